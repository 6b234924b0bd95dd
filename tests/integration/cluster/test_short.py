"""A cluster in a few seconds: one copy becomes three, the leader leaves, and no reader misses a message."""

import signal
from pathlib import Path

import anyio
import msgspec
import pytest
from integration.bus.test_restart import Load
from integration.cluster.nodes import Cluster, leader_of, settled

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.replies import ConsumerInfo
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import ROLLOUTS, STREAMS, stream_name


@pytest.mark.slow
async def test_one_copy_becomes_three_and_the_leader_leaves(tmp_path: Path, streams_config: StreamsConfig) -> None:
    load = Load()
    with Cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("one", "run") as bus, await cluster.connect("other", "run") as other:
            assert len(await bus.ensure_streams(streams_config)) > len(STREAMS)
            async with bus.consume(ROLLOUTS, "scorer", [subjects.rollout("run")]):
                pass
            with pytest.raises(ConfigError, match="is to have 5 copies, but too few servers"):
                await bus.ensure_streams(msgspec.structs.replace(streams_config, replicas=5))
            three = msgspec.structs.replace(streams_config, replicas=3)
            changes = await bus.ensure_streams(three)
            assert set(changes) == {f"changed {s.name}: num_replicas 1 -> 3" for s in await bus.describe_streams()}
            assert await bus.ensure_streams(three) == []
            await settled(bus, [stream.name for stream in await bus.describe_streams()])
            subject = f"$JS.API.CONSUMER.INFO.{stream_name(bus.run, ROLLOUTS)}.scorer"
            with anyio.fail_after(60):  # a consumer with one copy has no replicas
                while len(await replicas(bus, subject)) != 2:  # noqa: ASYNC110
                    await anyio.sleep(0.05)

            async with anyio.create_task_group() as readers:
                readers.start_soon(load.consume, other)
                readers.start_soon(load.follow, other)
                async with anyio.create_task_group() as writers:
                    writers.start_soon(load.publish, bus, "p")
                    writers.start_soon(load.commit, bus)
                    leader = await leader_of(bus, ROLLOUTS)
                    await grown(load, 100)
                    await cluster.end(leader, signal.SIGTERM)
                    await grown(load, 100)
                    load.stop = True
                await load.catch_up()  # with what the writers have left
                with anyio.fail_after(60):
                    while (await bus._link.call_api(ConsumerInfo, subject, b"", what="scorer")).num_pending:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                readers.cancel_scope.cancel()
            assert [seq for seq, _ in load.read] == sorted(load.acked.values())
            assert set(load.consumed) == set(load.acked)
            assert await leader_of(bus, ROLLOUTS) != leader


async def replicas(bus: NatsBus, consumer_info: str) -> list[object]:
    found = msgspec.json.decode((await bus._link.call_raw(consumer_info, b"", what="scorer")).data)
    return found.get("cluster", {}).get("replicas", [])


async def grown(load: Load, by: int) -> None:
    enough = len(load.acked) + by
    with anyio.fail_after(60):
        while len(load.acked) < enough:  # noqa: ASYNC110
            await anyio.sleep(0.01)


@pytest.mark.slow
async def test_no_replica_holds_more_than_it_may(tmp_path: Path, streams_config: StreamsConfig) -> None:
    """A consumer with several copies says that a request is done before the request's last messages arrive."""
    with Cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("one", "run") as bus:
            await bus.ensure_streams(msgspec.structs.replace(streams_config, replicas=3))
            for i in range(10):
                await bus.publish(subjects.rollout("run", "math"), bytes(100_000), msg_id=str(i))
            for attempt in range(6):
                held = []
                async with bus.consume(ROLLOUTS, f"s{attempt}", [subjects.rollout("run")], max_messages=3) as messages:
                    deliveries = aiter(messages)
                    with anyio.fail_after(60):
                        held += [await anext(deliveries) for _ in range(3)]
                    with anyio.move_on_after(0.3):
                        held.append(await anext(deliveries))
                assert len(held) == 3
