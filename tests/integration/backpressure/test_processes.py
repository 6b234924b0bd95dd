"""A real run whose trainer is frozen for ten lease periods: what every process holds stays as it was, and generation
goes on as soon as the trainer does.
"""

import os
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest
from integration.harness import RUN, Run, alive, until
from integration.servers import Supervised

from lachesis.pipeline.bus.api import Bus
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FROZEN_S = 30.0
GROWTH_BYTES = 16 << 20
"""Far below what a queue that grows would take in the time, far above what an allocator does."""


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    it = Run(tmp_path, 100_000, Supervised(tmp_path))
    with it:
        yield it


async def test_a_frozen_trainer_costs_no_memory_and_everything_returns_with_it(run: Run) -> None:
    run.start()
    await run.wait_for_step(5)
    config = run.load_config()
    capacity = (config.batching.max_staleness + 1) * config.batching.batch_size
    least = capacity - config.environments["sums"].samples + 1
    outstanding: list[float] = []
    full = 0  # heartbeats in a row that tell of it
    up: set[int] = set()

    async def follow_heartbeats(bus: Bus) -> None:
        nonlocal full
        async with bus.listen(subjects.heartbeat(RUN)) as beats:
            async for message in beats:
                beat = decode(Heartbeat, message.data)
                if beat.stage.state != "starting":
                    up.add(beat.pid)
                if beat.service == "governor" and "flow/outstanding" in beat.metrics:
                    outstanding.append(beat.metrics["flow/outstanding"])
                    under_way = beat.metrics["flow/leased"] + beat.metrics["flow/accepted"]
                    full = full + 1 if outstanding[-1] >= least and not under_way else 0

    async with run.servers.during("watcher") as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(follow_heartbeats, bus)
        pids = run.pids()
        services = {pid for name, pid in pids.items() if name not in ("supervisor", "nats-server")}
        await until(lambda: services <= up, 120)
        os.kill(pids["trainer"], signal.SIGSTOP)
        try:
            full = 0
            await until(lambda: full >= 3, 120)  # what was under way is in batches, and so is what was still admitted
            stored = (await bus.usage(subjects.ROLLOUTS)).last
            before = memory(pids)
            most: defaultdict[str, int] = defaultdict(int)
            end = time.monotonic() + FROZEN_S
            while time.monotonic() < end:
                await anyio.sleep(0.5)
                for name, size in memory(pids).items():
                    most[name] = max(most[name], size)
            assert (await bus.usage(subjects.ROLLOUTS)).last == stored, "stored while the trainer was frozen"
        finally:
            os.kill(pids["trainer"], signal.SIGCONT)
        policy = await bus.value(keys.POLICY)
        async with bus.watch(keys.POLICY) as records:
            async for record in records:
                if policy is not None and record.revision > policy.revision:
                    break
        trained = time.monotonic()
        async with bus.read(
            subjects.ROLLOUTS, [subjects.rollout(RUN)], start=stored + 1, headers_only=True
        ) as rollouts:
            await anext(aiter(rollouts))
        returned_s = time.monotonic() - trained
        step = run.step()
        await run.wait_for_step(step + 5)
        tasks.cancel_scope.cancel()
    grown = {name: most[name] - before[name] for name in before}
    print(
        f"outstanding {max(outstanding):g} of {capacity}; the next rollout came {returned_s:.2f} s after the first step"
    )
    print("grown, KiB:", {name: size >> 10 for name, size in sorted(grown.items(), key=lambda item: -item[1])})
    assert max(outstanding) <= capacity
    assert all(alive(pid) for pid in pids.values()), "something did not survive the wait"
    assert max(grown.values()) <= GROWTH_BYTES


def memory(pids: dict[str, int]) -> dict[str, int]:
    """Resident bytes of each process by its name."""
    return {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
