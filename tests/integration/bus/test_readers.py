"""What readers leave on a server: no consumer without a reader, and none where there was nothing to read."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from integration.batcher.test_batcher import World
from nats.aio.msg import Msg
from stages import run_batcher

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig, TeacherConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, kind_of, stream_name

RUN = "r"
MATH = subjects.rollout("r", "math")


async def consumers(bus: NatsBus, stream: str) -> list[str]:
    answer = await bus._link.nc.request(f"$JS.API.CONSUMER.NAMES.{stream_name(bus.run, stream)}", b"{}", timeout=30)
    return msgspec.json.decode(answer.data).get("consumers") or []


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(25):  # the server forgets any consumer after 30
        while not await condition():  # noqa: ASYNC110 - it is requested of a server
            await anyio.sleep(0.02)


@asynccontextmanager
async def counted(bus: NatsBus) -> AsyncIterator[list[str]]:
    """Yield the streams of the consumers that the server makes meanwhile, in order."""
    made: list[str] = []

    async def note(msg: Msg) -> None:
        made.append(kind_of(msg.subject.split(".")[-2]))

    nc = bus._link.nc
    sub = await nc.subscribe("$JS.EVENT.ADVISORY.CONSUMER.CREATED.>", cb=note)
    await nc.flush()
    yield made
    await nc.flush()
    await sub.unsubscribe()


async def test_a_reader_that_gathers_asks_again_only_after_messages(nats_bus: NatsBus) -> None:
    """While nothing is there it waits for one message, and then asks for all that came with it."""
    asked, read = [], []
    changed = anyio.Event()

    async def note(msg: Msg) -> None:
        request = msgspec.json.decode(msg.data)
        asked.append("what is there" if request.get("no_wait") else f"wait for {request['batch']}")
        changed.set()

    async def follow() -> None:
        async with nats_bus.read(ROLLOUTS, [MATH], gather_s=0.01) as messages:
            read.append((await anext(messages)).seq)
            await anext(messages)

    async def until_asked(wanted: list[str]) -> None:
        nonlocal changed
        while len(asked) < len(wanted):
            changed = anyio.Event()
            await changed.wait()
        assert asked == wanted

    nc = nats_bus._link.nc
    sub = await nc.subscribe("$JS.API.CONSUMER.MSG.NEXT.>", cb=note)
    await nc.flush()
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            await until_asked(["what is there", "wait for 1"])
            await nats_bus.publish(MATH, b"x", msg_id="1")
            await until_asked(["what is there", "wait for 1", "what is there", "wait for 1"])
            assert read == [1]
            tasks.cancel_scope.cancel()
    await sub.unsubscribe()


async def test_a_reader_that_is_closed_leaves_no_consumer(nats_bus: NatsBus) -> None:
    await nats_bus.publish(MATH, b"x", msg_id="1")
    async with nats_bus.read(ROLLOUTS, [MATH], follow=False) as messages:
        assert [message.seq async for message in messages] == [1]
    async with nats_bus.read(ROLLOUTS, [MATH]) as messages:
        assert (await anext(aiter(messages))).seq == 1
    with anyio.CancelScope() as scope:
        async with nats_bus.read(ROLLOUTS, [MATH]) as messages:
            async for _ in messages:
                scope.cancel()

    async def none_left() -> bool:
        return await consumers(nats_bus, ROLLOUTS) == []

    await until(none_left)


@pytest.mark.slow  # the request that is still open keeps it for up to 20 s
async def test_a_consumer_that_is_given_up_for_another_goes_as_well(nats_bus: NatsBus) -> None:
    await nats_bus.publish(MATH, b"x", msg_id="1")
    async with nats_bus.read(ROLLOUTS, [MATH]) as messages:
        assert (await anext(aiter(messages))).seq == 1
        (first,) = await consumers(nats_bus, ROLLOUTS)
        messages.pull.recreate()  # type: ignore[attr-defined]

        async def replaced() -> bool:
            now = await consumers(nats_bus, ROLLOUTS)
            return len(now) == 1 and now != [first]

        await until(replaced)
        await nats_bus.publish(MATH, b"y", msg_id="2")
        assert (await anext(aiter(messages))).seq == 2


async def test_a_read_to_the_end_makes_no_consumer_where_it_is_there_already(nats_bus: NatsBus) -> None:
    ack = await nats_bus.publish(MATH, b"x", msg_id="1")
    async with counted(nats_bus) as made:
        for start, filters in ((ack.seq + 1, [MATH]), (1, [subjects.rollout("other")])):
            async with nats_bus.read(ROLLOUTS, filters, start=start, follow=False) as messages:
                assert [message async for message in messages] == []
        async with nats_bus.read(ROLLOUTS, [MATH], follow=False) as messages:
            assert len([message async for message in messages]) == 1
    assert made == [ROLLOUTS]


async def test_closing_a_reader_does_not_wait_for_a_server_that_is_gone(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    async with await connect(fresh_server.url, run="r", name="tests", token=fresh_server.token) as bus:
        await bus.ensure_streams(streams_config)
        await bus.publish(MATH, b"x", msg_id="1")
        with anyio.fail_after(60):
            async with bus.read(ROLLOUTS, [MATH]) as messages:
                await anext(aiter(messages))
                await fresh_server.stop()
                await bus.until_down()


async def test_deadlines_that_were_met_make_no_consumer(nats_bus: NatsBus) -> None:
    """Sixty rollouts with a teacher's pointer and no reward yet: no reader has to look when their deadlines pass."""
    config = RunConfig(
        run="r",
        batching=BatchingConfig(batch_size=8, teacher="optional", teacher_deadline_s=0.3),
        teacher=TeacherConfig(enabled=True),
    )
    world, service = World(nats_bus), Service(nats_bus, "batcher", "r")

    async with counted(nats_bus) as made, anyio.create_task_group() as tasks:
        tasks.start_soon(run_batcher, service, config)

        async def reading() -> bool:
            return sorted(made) == [EVENTS, ROLLOUTS, ROLLOUTS]  # annotations, rollouts, promotions

        await until(reading)
        for _ in range(60):
            await world.teach(await world.rollout())
        await world.reward(await world.rollout())  # without a teacher: it is ready when its deadline has passed

        async def last_deadline_passed() -> bool:
            return service.vitals.metrics.get("batching/ready_groups") == 1.0

        await until(last_deadline_passed)
        tasks.cancel_scope.cancel()
    assert sorted(made) == [EVENTS, ROLLOUTS, ROLLOUTS]
