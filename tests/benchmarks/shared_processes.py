"""The demo's services in processes of their own beside shared ones: memory, CPU a group, idle CPU, and kills.

    python tests/benchmarks/shared_processes.py --model FOLDER

`--model`: a folder that `lachesis demo` made (`RUN/model`). For each arrangement in turn: `lachesis up` trains with the
demo's services; then its environment holds every rollout, and what a run costs that stands still is measured; then it
goes on, and processes are killed -9 while it trains: the one with the governor, and all but the supervisor at once.
Prints a line for each figure. Memory is the proportional set size of all processes, without the supervisor's
spectators; back is the time from a kill until each killed service says again that it is ready.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import aclosing
from importlib.resources import files
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from held_words import HOLD
from integration.harness import steps_trained, until
from speed.processes import by_service, descendants, snapshot

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats

_PATIENCE_S = 180.0
_WORDS = Path(__file__).with_name("held_words.py")
_SETTLE_S = 15.0
_ALL = '[["governor", "batcher", "normalizer", "curriculum", "health", "teacher"]]'


def pss_bytes(pids: list[int]) -> int:
    """Return the memory of processes, what several share counted once."""
    found = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return found


class Run:
    """One `lachesis up` in a folder."""

    def __init__(self, place: Path, model: Path, together: str) -> None:
        self.folder, self.hold, self.pid = place / "run", place / "hold", 0
        demo = files("lachesis.services.demo").joinpath("demo.toml").read_text()
        text = demo.replace('kind = "spell_backward"', f'kind = "{_WORDS}:HeldWords"\ntimeout_s = 3600', 1).replace(
            "steps = 100", ""
        )
        (place / "run.toml").write_text(f'run = "shared"\nfolder = "{self.folder}"\nmodel = "{model}"\n{text}')
        sets = ["--set", f"services.together={together}"]
        self.command = [sys.executable, "-m", "lachesis", "up", "--config", str(place / "run.toml"), *sets]
        self.environ = os.environ | {HOLD: str(self.hold), "XDG_STATE_HOME": str(place / "state")}

    def start(self) -> "subprocess.Popen[bytes]":
        with (self.folder.parent / "up.log").open("ab") as log:
            up = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environ)
        self.pid = up.pid
        return up

    def groups(self) -> int:
        return 16 * steps_trained(self.folder)

    def pids(self) -> list[int]:
        return descendants(self.pid)

    def named(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.folder / "pids.json").read_bytes())
        return {name: pid for name, pid in found.items() if pid}

    async def until_step(self, step: int) -> None:
        await until(lambda: steps_trained(self.folder) >= step, _PATIENCE_S)


async def measure(run: Run, arguments: argparse.Namespace) -> None:
    """Print the figures of one run."""
    began = time.monotonic()
    await run.until_step(1)
    print(f"  first trained step after {time.monotonic() - began:.1f} s", flush=True)
    await run.until_step(arguments.steps)
    before = snapshot(by_service(run.pids()), run.groups())
    await run.until_step(2 * arguments.steps)
    print(f"  memory {pss_bytes(run.pids()) / 1e6:.0f} MB in {len(run.pids())} processes")
    by_name = {name: pss_bytes(pids) / 1e6 for name, pids in by_service(run.pids()).items()}
    print("    " + ", ".join(f"{name} {size:.0f}" for name, size in sorted(by_name.items())))
    after = snapshot(by_service(run.pids()), run.groups())
    spent = {name: after.cpu_s[name] - before.cpu_s.get(name, 0.0) for name in after.cpu_s}
    groups = after.groups - before.groups
    _print_cpu("CPU ms a group", {name: 1e3 * s / groups for name, s in spent.items()})
    run.hold.touch()
    await anyio.sleep(_SETTLE_S)
    before = snapshot(by_service(run.pids()))
    await anyio.sleep(arguments.idle_s)
    after = snapshot(by_service(run.pids()))
    share = 60 / (after.time_s - before.time_s)
    _print_cpu(
        "CPU s a minute, standing still", {name: share * (s - before.cpu_s[name]) for name, s in after.cpu_s.items()}
    )
    if arguments.shell:
        print(f"  standing still: {run.named()}", flush=True)
        await anyio.sleep(arguments.shell)
    run.hold.unlink()
    await run.until_step(steps_trained(run.folder) + 2)
    for _ in range(arguments.kills):
        holder = next(name for name in run.named() if "governor" in name)
        await _kill(run, [holder])
        await _kill(run, [name for name in run.named() if name != "supervisor"])


def _print_cpu(what: str, figures: dict[str, float]) -> None:
    print(f"  {what}: {sum(figures.values()):.2f}")
    print("    " + ", ".join(f"{name} {value:.2f}" for name, value in sorted(figures.items()) if value > 0), flush=True)


async def _kill(run: Run, names: list[str]) -> None:
    """Kill processes, and print how long their services were away and until the next step was trained."""
    victims = {pid for name, pid in run.named().items() if name in names}
    endpoint = read_endpoint(run.folder / "nats")
    lives: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    away: set[tuple[str, str]] = set()
    back: dict[tuple[str, str], float] = {}
    begins, killed, step = time.monotonic() + 2.5, 0.0, 0
    async with (
        await connect(endpoint.url, run="shared", name="bench", token=endpoint.token) as bus,
        aclosing(listen_to_heartbeats(bus, "shared")) as beats,
    ):
        with anyio.fail_after(_PATIENCE_S):
            async for beat in beats:
                key = beat.service, beat.replica
                if not killed:
                    lives[key].add(beat.pid)
                    if time.monotonic() > begins:
                        away = {key for key, pids in lives.items() if pids & victims}
                        step, killed = steps_trained(run.folder), time.monotonic()
                        for pid in victims:
                            os.kill(pid, signal.SIGKILL)
                elif key in away and beat.pid not in lives[key] and beat.stage.state not in {"starting", "draining"}:
                    back.setdefault(key, time.monotonic() - killed)
                    if len(back) == len(away):
                        break
    await run.until_step(step + 2)
    stepped = time.monotonic() - killed
    what = names[0] if len(names) == 1 else f"all {len(names)}"
    last = max(back, key=lambda key: back[key])
    print(f"  killed {what}: its {len(away)} services back after {back[last]:.2f} s, {last[0]} the last, "
          f"two more steps after {stepped:.1f} s", flush=True)  # fmt: skip
    print("    " + ", ".join(f"{service} {seconds:.2f}" for (service, _), seconds in sorted(back.items())))


def main() -> None:
    arguments = parse()
    for together in arguments.together:
        print(f"together = {together}", flush=True)
        with tempfile.TemporaryDirectory(prefix="lachesis-shared-") as place:
            run = Run(Path(place), arguments.model.absolute(), together)
            up = run.start()
            try:
                anyio.run(measure, run, arguments)
            except BaseException:
                print((run.folder.parent / "up.log").read_text()[-3000:])
                raise
            finally:
                up.send_signal(signal.SIGTERM)
                up.wait(120)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--together", nargs="+", default=["[]", _ALL], help="values of services.together")
    parser.add_argument("--steps", type=int, default=8, help="steps before, and steps of, the measurement under way")
    parser.add_argument("--idle-s", type=float, default=60.0)
    parser.add_argument("--kills", type=int, default=2, help="kills of one process and of all")
    parser.add_argument("--shell", type=float, default=0.0, help="further seconds to stand still, to look around")
    return parser.parse_args()


if __name__ == "__main__":
    main()
