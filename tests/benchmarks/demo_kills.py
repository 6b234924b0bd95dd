"""The demo, with every one of its processes killed -9 once while it trains: nats-server and the supervisor too.

    python tests/benchmarks/demo_kills.py --out runs/kills

One process is killed every few steps, in an order drawn from the seed, the supervisor last. Prints when each was killed
and how long it took until its successor ran, then the demo's own verdict and the audit of the streams. Exits with 1
unless all came back, the demo passed its gate and the audit found nothing.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.audit import Audit, audit
from integration.harness import steps_trained

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer


def pids(folder: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((folder / "pids.json").read_bytes())
    return found


def wait_for_step(folder: Path, run: "subprocess.Popen[bytes]", wanted: int) -> None:
    while steps_trained(folder) < wanted:
        if run.poll() is not None:
            sys.exit(f"the run ended with code {run.returncode} at step {steps_trained(folder)}; see {folder}.log")
        time.sleep(0.05)


def kill_all(folder: Path, demo: "subprocess.Popen[bytes]", first: int, apart: int, seed: int) -> list[str]:
    """Kill every process once; return the names of those that did not come back."""
    wait_for_step(folder, demo, first)
    names = sorted(set(pids(folder)) - {"supervisor"})
    random.Random(seed).shuffle(names)
    lost = []
    for number, name in enumerate([*names, "supervisor"]):
        wait_for_step(folder, demo, first + number * apart)
        lost += [name] * (not kill(folder, name))
    return lost


def kill(folder: Path, name: str) -> bool:
    """Kill a process, wait for its successor, and print how long that took; return whether it came within 30 s."""
    before = pids(folder)
    os.kill(before[name], signal.SIGKILL)
    killed, end = time.monotonic(), time.monotonic() + 30
    while pids(folder).get(name, before[name]) == before[name] and time.monotonic() < end:
        time.sleep(0.02)
    back = time.monotonic() - killed
    print(
        f"step {steps_trained(folder):4}  killed {name:20} pid {before[name]:7}, its successor ran after {back:.2f} s",
        flush=True,
    )
    return time.monotonic() < end


async def audit_streams(folder: Path) -> Audit:
    async with (
        EmbeddedServer(folder / "nats") as server,
        await connect(server.url, run=folder.name, name="audit", token=server.token) as bus,
    ):
        return await audit(bus, folder.name)


def main() -> None:
    arguments = parse()
    folder: Path = arguments.out.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "lachesis", "demo", "--seed", str(arguments.seed), "--run", folder.name]
    with folder.with_suffix(".log").open("wb") as log:
        demo = subprocess.Popen([*command, "--folder", str(folder)], stdout=log, stderr=log)
    lost = kill_all(folder, demo, arguments.first, arguments.apart, arguments.seed)
    code = demo.wait()
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    found = anyio.run(audit_streams, folder)
    gate = summary["gate"]
    print(f"demo: {summary['state']}, exit code {code}, {summary['walls']['total']:.0f} s in all")
    if gate["gain"] is None:
        print("gate: not measured before and after")
    else:
        print(f"gate: {gate['before']:.1%} -> {gate['after']:.1%} ({gate['gain']:+.1f} points)")
    print(f"audit: {found}")
    sys.exit(bool(lost or code or found.violations))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the run's folder, to be made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=4, help="step at which the first process is killed")
    parser.add_argument("--apart", type=int, default=6, help="steps between two kills")
    return parser.parse_args()


if __name__ == "__main__":
    main()
