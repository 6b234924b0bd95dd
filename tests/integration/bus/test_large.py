"""Large messages on a real server: chunks, their loss, their trimming."""

import os

import anyio
import pytest

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import ROLLOUTS

MATH = subjects.rollout("run", "math")
ALL = subjects.rollout("run")
SIZE = 5 << 20


async def chunks(bus: Bus) -> int:
    async with bus.read(ROLLOUTS, ["rl.blob.*"], headers_only=True, follow=False) as reader:
        return len([m async for m in reader])


async def test_a_lost_chunk_is_bad_data_and_blocks_nobody(nats_bus: NatsBus) -> None:
    await nats_bus.publish_large(MATH, os.urandom(SIZE), msg_id="1")
    await nats_bus.publish(MATH, b"next", msg_id="2")
    await nats_bus._link.nc.jetstream().purge_stream(ROLLOUTS, subject="rl.blob.*", seq=4)
    with pytest.raises(DataError, match="a chunk is gone"):
        await nats_bus.get(ROLLOUTS, 11)
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        broken, following = await anext(deliveries), await anext(deliveries)
    assert "a chunk is gone" in broken.message.headers["Lachesis-Broken"]
    assert following.message.data == b"next"
    async with nats_bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert ["Lachesis-Broken" in m.headers async for m in reader] == [True, False]


async def test_a_forged_head_is_bad_data(nats_bus: NatsBus) -> None:
    for i, data in enumerate((b"", b"\xc1", b"\x93\xdd\xff\xff\xff\xff", b"\x93\x91\x01\xce\xff\xff\xff\xff\xc0")):
        ack = await nats_bus.publish(MATH, data, msg_id=str(i), headers={"Lachesis-Large": "rl.blob.x"})
        with pytest.raises(DataError):
            await nats_bus.get(ROLLOUTS, ack.seq)


async def test_chunks_go_with_their_head(nats_bus: NatsBus) -> None:
    data = [os.urandom(SIZE) for _ in range(3)]
    heads = [(await nats_bus.publish_large(MATH, d, msg_id=str(i))).seq for i, d in enumerate(data)]
    assert await chunks(nats_bus) == 30
    assert await nats_bus.trim(ROLLOUTS, [ALL], before=heads[1]) == 1
    assert await chunks(nats_bus) == 20
    assert [m.data async for m in nats_bus.fetch(ROLLOUTS, heads[1:])] == data[1:]
    assert await nats_bus.trim(ROLLOUTS, [ALL], before=10_000) == 1
    assert (await nats_bus.get(ROLLOUTS, heads[2])).data == data[2]


async def test_large_and_small_in_one_fetch(nats_bus: NatsBus) -> None:
    data = [os.urandom(SIZE if i % 7 == 0 else 4 << 20 if i % 3 == 0 else 100) for i in range(20)]
    seqs = [(await nats_bus.publish_large(MATH, d, msg_id=str(i))).seq for i, d in enumerate(data)]
    assert [m.data async for m in nats_bus.fetch(ROLLOUTS, seqs)] == data
    async with nats_bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert [m.data async for m in reader] == data


async def test_a_large_message_survives_a_restart_in_the_middle(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    data = os.urandom(40 << 20)
    async with await connect(fresh_server.url, name="test", token=fresh_server.token) as bus:
        await bus.ensure_streams(streams_config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: bus.publish_large(MATH, data, msg_id="1"))
            with anyio.fail_after(10):
                while (await bus.usage(ROLLOUTS)).messages < 5:
                    pass
            os.kill(fresh_server.pid, 9)
            await fresh_server.wait()
            await fresh_server.start()
        message = await bus.last(ROLLOUTS, MATH)
        assert message is not None
        assert message.data == data
        assert message.seq == 81


async def test_a_replica_holds_no_more_bytes_of_large_messages_than_of_small_ones(nats_bus: NatsBus) -> None:
    for i in range(4):
        await nats_bus.publish_large(MATH, bytes(SIZE), msg_id=str(i))
    await nats_bus.publish_large(MATH, bytes(3 * SIZE), msg_id="larger than the bound")
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL], max_bytes=2 * SIZE + (1 << 20)) as deliveries:
        held = [await anext(deliveries), await anext(deliveries)]
        with anyio.move_on_after(0.3) as waiting:
            await anext(deliveries)
        assert waiting.cancelled_caught, "a third one would pass the bound"
        for following in (1, 2):
            await held.pop(0).ack()
            with anyio.fail_after(5):
                held.append(await anext(deliveries))
            assert len(held) == 2, following
        await held.pop().ack()
        with anyio.move_on_after(0.3) as waiting:
            await anext(deliveries)
        assert waiting.cancelled_caught, "the largest one comes only when nothing else is held"
        await held.pop().ack()
        with anyio.fail_after(5):
            assert len((await anext(deliveries)).message.data) == 3 * SIZE
