"""A whole run on a cluster whose nodes end under it: every service goes on, and nothing is lost or there twice."""

import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from integration.audit import audit
from integration.cluster.nodes import Cluster, leader_of, settled
from integration.harness import RUN, Run

from lachesis.schemas.subjects import LEDGER, ROLLOUTS, STREAMS

STEPS = 60
STRIKES = [
    (signal.SIGKILL, LEDGER),
    (signal.SIGTERM, ROLLOUTS),
    (signal.SIGSTOP, LEDGER),
    (signal.SIGKILL, ROLLOUTS),
]
FRESH = 5
"""Steps after which every service has worked since: more than what may have been under way."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    folder = tmp_path / "a run"
    folder.mkdir()
    with Cluster(tmp_path / "three nodes") as cluster:
        it = Run(folder, STEPS, cluster)
        with it:
            yield it


async def test_a_run_outlives_its_leaders(run: Run) -> None:
    cluster = run.servers
    assert isinstance(cluster, Cluster)
    run.start()
    await run.wait_for_step(2)
    async with cluster.during("test") as bus:
        for how, stream in STRIKES:
            await settled(bus, STREAMS)
            before, services = run.step(), dict(run.pids())
            node = await leader_of(bus, stream)
            await cluster.strike(node, how)
            ended = anyio.current_time()
            await run.wait_for_step(min(before + FRESH, STEPS - 1))
            print(f"{how.name} of {stream}'s leader: {FRESH} steps later after {anyio.current_time() - ended:.1f} s")
            assert {n: p for n, p in run.pids().items() if n not in cluster.names} == {
                n: p for n, p in services.items() if n not in cluster.names
            }, "a service ended with the node"
            cluster.mend(node)
    assert await run.wait(400) == 0, run.tail()
    async with cluster.afterwards("audit") as bus:
        found = await audit(bus, RUN)
        assert {stream.replicas for stream in await bus.describe_streams()} == {3}
    assert found.violations == []
    assert found.batches >= STEPS
    print(f"audit: {found}")
