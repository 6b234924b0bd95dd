"""A node is cut off from its cluster while clients still reach it: they go to the others, and come back afterwards."""

from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import pytest
from integration.audit import audit
from integration.bus.test_restart import STATE, Load
from integration.cluster.nodes import Cluster, leader_of, make_streams, settled
from integration.cluster.partition import SplitCluster, open_split_cluster
from integration.harness import RUN, Run

from lachesis.pipeline.bus import connection, failover
from lachesis.pipeline.bus.config import ConnectionConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.subjects import LEDGER, ROLLOUTS, STREAMS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 40
LOAD_RUN = "run"
"""The run that `Load` writes to."""
FRESH = 5
"""Steps after which every service has worked since: more than what may have been under way."""
CUT_OFF_S = 600.0
"""Longer than the test waits for anything: whatever goes on meanwhile goes on without that node."""


async def test_work_goes_on_beside_a_node_that_is_cut_off(
    tmp_path: Path, streams_config: StreamsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_HOME_INTERVAL_S", (0.5, 1.0))
    load = Load()
    async with open_split_cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("test", LOAD_RUN) as other:
            await make_streams(other, msgspec.structs.replace(streams_config, rollouts_bytes=2 << 30))
            await settled(other, STREAMS)
            node = await leader_of(other, ROLLOUTS)
        async with (
            await connected_to(cluster, node) as producer,
            await connected_to(cluster, node) as consumer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(producer.keep_served)
            tasks.start_soon(consumer.keep_served)
            async with anyio.create_task_group() as readers:
                readers.start_soon(load.consume, consumer)
                readers.start_soon(load.follow, consumer)
                async with anyio.create_task_group() as writers:
                    writers.start_soon(load.publish, producer, "p")
                    writers.start_soon(load.commit, producer)
                    await load.grow()
                    async with anyio.create_task_group() as cut:
                        cut.start_soon(cluster.cut_off, node, CUT_OFF_S)
                        await until_at(cluster, producer, node, away=True)
                        await until_at(cluster, consumer, node, away=True)
                        await load.grow()
                        cut.cancel_scope.cancel()
                    await until_at(cluster, producer, node)
                    await until_at(cluster, consumer, node)
                    await load.grow()
                    load.stop = True
                await load.catch_up()
                readers.cancel_scope.cancel()
            async with producer.read(ROLLOUTS, [subjects.rollout("run")], follow=False) as reader:
                stored = [(m.seq, m.headers["Nats-Msg-Id"]) async for m in reader]
            async with producer.read(LEDGER, [STATE], follow=False) as reader:
                commits = [(m.seq, m.headers["Nats-Msg-Id"]) async for m in reader]
            tasks.cancel_scope.cancel()
    assert sorted(stored) == sorted((seq, msg_id) for msg_id, seq in load.acked.items())  # none lost, none twice
    assert load.read == stored
    assert commits == load.committed


async def test_a_run_goes_on_beside_a_node_that_is_cut_off(tmp_path: Path) -> None:
    """The node that most lean on; no service ends with it, none stays with it."""
    folder = tmp_path / "a run"
    folder.mkdir()
    async with open_split_cluster(tmp_path / "three nodes") as cluster:
        with Run(folder, STEPS, cluster) as run:
            await anyio.to_thread.run_sync(run.start)
            await run.wait_for_step(2)
            async with cluster.during("test") as bus:
                await settled(bus, STREAMS)
                node = await leader_of(bus, LEDGER)
            async with anyio.create_task_group() as cut:
                cut.start_soon(cluster.cut_off, node, CUT_OFF_S)
                services, before, began = dict(run.pids()), run.step(), anyio.current_time()
                await run.wait_for_step(before + FRESH)
                print(f"{FRESH} steps after {anyio.current_time() - began:.1f} s")
                assert run.pids() == services
                cut.cancel_scope.cancel()
            assert await run.wait(400) == 0, run.tail()
        async with cluster.afterwards("audit") as bus:
            found = await audit(bus, RUN)
    assert found.violations == []
    assert found.batches >= STEPS


async def test_whoever_starts_meets_no_dead_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that is tried first knows no other: the next one is taken, long before one gives up."""
    monkeypatch.setattr(connection.random, "shuffle", lambda _: None)
    async with open_split_cluster(tmp_path / "three nodes") as cluster:
        node = cluster.names[0]
        await cluster.end(node)
        async with anyio.create_task_group() as cut:
            cut.start_soon(cluster.cut_off, node, CUT_OFF_S)
            await anyio.wait_all_tasks_blocked()
            cluster.start(node)
            await until_listening(cluster.ports[node])
            async with await cluster.connect("somebody") as bus:
                assert bus.server != ("127.0.0.1", cluster.ports[node])
            cut.cancel_scope.cancel()


async def test_without_a_quorum_nobody_moves(tmp_path: Path, streams_config: StreamsConfig) -> None:
    with Cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("test") as bus, anyio.create_task_group() as tasks:
            await make_streams(bus, streams_config)
            tasks.start_soon(bus.keep_served)
            stays, *killed = sorted(cluster.names, key=lambda name: str(cluster.ports[name]) not in str(bus.server))
            for name in killed:
                await cluster.end(name)
            tasks.start_soon(publish, bus)
            with anyio.fail_after(120):
                while bus.stall is None or bus.stall.seconds < failover.LEAVE_AFTER_S + 6:  # noqa: ASYNC110
                    await anyio.sleep(0.1)
            assert bus.reconnects == 0
            assert bus.server == ("127.0.0.1", cluster.ports[stays])
            tasks.cancel_scope.cancel()


async def until_listening(port: int) -> None:
    with anyio.fail_after(60):
        while True:
            with suppress(OSError):
                async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                    await stream.receive()
                    return
            await anyio.sleep(0.02)


async def publish(bus: NatsBus) -> None:
    await bus.publish(subjects.rollout("run", "math"), b"", msg_id="1")


async def connected_to(cluster: SplitCluster, node: str) -> NatsBus:
    """Return a bus that is connected to `node` and knows all of them."""
    config = ConnectionConfig(connect_timeout_s=60.0, token_file=str(cluster.folder / "token"))
    while True:
        bus = await connect(cluster.url, run=LOAD_RUN, name="test", config=config)
        if bus.server == ("127.0.0.1", cluster.ports[node]):
            return bus
        await bus.close()


async def until_at(cluster: SplitCluster, bus: NatsBus, node: str, *, away: bool = False) -> None:
    """Wait until `bus` is connected to `node`, or to any other."""
    with anyio.fail_after(120):
        while bus.server is None or (bus.server[1] == cluster.ports[node]) == away:  # noqa: ASYNC110
            await anyio.sleep(0.05)
