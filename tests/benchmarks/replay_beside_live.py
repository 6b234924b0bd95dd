"""Live throughput with and without a replay beside it: `python tests/benchmarks/replay_beside_live.py --max-rate 20`.

A whole run on an embedded server, every service a process, a tiny untrained model, so that the pipeline and not the
model is what is busy. Windows of `--window` seconds without and with `lachesis replay --max-rate` on the run's own
history follow each other in random order, `--pairs` of each; printed are groups stored a second and their ratio, pair
by pair. Everything shares the machine's cores, so the replay's own work shows too.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.harness import Run
from integration.servers import Supervised

from lachesis.pipeline.bus.api import Bus
from lachesis.schemas.subjects import REPLAY, ROLLOUTS

_WARM_UP_STEPS = 100


@contextmanager
def replaying(run: Run, revision: str, max_rate: float) -> Iterator[None]:
    with (run.folder / "replay.log").open("ab") as log:
        replay = run.spawn("replay", "--revision", revision, "--max-rate", str(max_rate), log=log)
        try:
            yield
            if replay.poll() is not None:
                raise SystemExit(f"the replay ended before its window: make --warm-up longer. See {log.name}")
        finally:
            replay.send_signal(signal.SIGINT)
            replay.wait()


async def groups_a_second(bus: Bus, seconds: float) -> float:
    first, began = (await bus.usage(ROLLOUTS)).last, anyio.current_time()
    await anyio.sleep(seconds)
    return float((await bus.usage(ROLLOUTS)).last - first) / (anyio.current_time() - began)


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), 1_000_000, Supervised(Path(folder)), sets={"evaluate.every_steps": 1_000_000})
        with run:
            run.start()
            await run.wait_for_step(options.warm_up)
            async with run.servers.during("benchmark") as bus:
                await measure(run, bus, options)


async def measure(run: Run, bus: Bus, options: argparse.Namespace) -> None:
    draw = random.Random(0)
    ratios = []
    for number in range(options.pairs):
        rate = {}
        for beside in draw.sample([False, True], 2):
            if not beside:
                rate[beside] = await groups_a_second(bus, options.window)
                continue
            before = (await bus.usage(REPLAY)).last
            with replaying(run, f"pair-{number}", options.max_rate):
                while (await bus.usage(REPLAY)).last <= before + 1:  # noqa: ASYNC110 - until it works
                    await anyio.sleep(0.05)
                rate[beside] = await groups_a_second(bus, options.window)
        ratios.append(rate[True] / rate[False])
        print(f"{rate[False]:7.1f} groups/s without, {rate[True]:7.1f} with: {ratios[-1]:.3f}", flush=True)
    middle = statistics.median(ratios)
    print(
        f"with / without a replay of {options.max_rate:g} groups/s: {middle:.3f} ({min(ratios):.3f}..{max(ratios):.3f})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-rate", type=float, default=20.0)
    parser.add_argument("--window", type=float, default=10.0, help="seconds")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=_WARM_UP_STEPS, help="steps, which make the history")
    anyio.run(main, parser.parse_args())
