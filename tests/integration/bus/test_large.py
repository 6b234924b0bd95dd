"""Large messages on a real server: chunks, their loss, their trimming."""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from lachesis.pipeline.bus import trimming
from lachesis.pipeline.bus.api import Bus, PubAck
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER, stream_name

MATH = subjects.rollout("run", "math")
CODE = subjects.rollout("run", "code")
ALL = subjects.rollout("run")
SIZE = 5 << 20


async def chunks(bus: Bus) -> int:
    async with bus.read(ROLLOUTS, [subjects.blob("rollout", "run")], headers_only=True, follow=False) as reader:
        return len([m async for m in reader])


async def test_a_lost_chunk_is_bad_data_and_blocks_nobody(nats_bus: NatsBus) -> None:
    await nats_bus.publish_large(MATH, os.urandom(SIZE), msg_id="1")
    await nats_bus.publish(MATH, b"next", msg_id="2")
    await nats_bus._link.nc.jetstream().purge_stream(
        stream_name("run", ROLLOUTS), subject=subjects.blob("rollout", "run"), seq=4
    )
    with pytest.raises(DataError, match="a chunk is gone"):
        await nats_bus.get(ROLLOUTS, 11)
    assert (await nats_bus.get_head(ROLLOUTS, 11)).headers["Nats-Msg-Id"] == "1", "none of its chunks is read"
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        broken, following = await anext(deliveries), await anext(deliveries)
    assert "a chunk is gone" in broken.message.headers["Lachesis-Broken"]
    assert following.message.data == b"next"
    async with nats_bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert ["Lachesis-Broken" in m.headers async for m in reader] == [True, False]


async def test_a_forged_head_is_bad_data(nats_bus: NatsBus) -> None:
    for i, data in enumerate((b"", b"\xc1", b"\x93\xdd\xff\xff\xff\xff", b"\x93\x91\x01\xce\xff\xff\xff\xff\xc0")):
        ack = await nats_bus.publish(MATH, data, msg_id=str(i), headers={"Lachesis-Large": "rl.blob.rollout.run.x"})
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


async def test_a_forged_head_takes_nothing_of_others_with_it(nats_bus: NatsBus) -> None:
    large = await nats_bus.publish_large(MATH, os.urandom(SIZE), msg_id="1")
    (real,) = await nats_bus.stored_subjects(ROLLOUTS, [subjects.blob("rollout", "run")])
    forged = (
        "rl.rollout.run.*", "rl.blob.rollout.run.*", "rl.blob.rollout.run.math.*", ">",
        "rl.blob.rollout.other." + 32 * "0", real, real.replace(".math.", ".code."), real.replace(".math.", "."),
    )  # fmt: skip
    for i, header in enumerate(forged):
        await nats_bus.publish(CODE, b"", msg_id=f"forged {i}", headers={"Lachesis-Large": header})
    last = await nats_bus.publish(CODE, b"", msg_id="last")
    assert await nats_bus.trim(ROLLOUTS, [CODE], before=last.seq) == len(forged)
    assert len((await nats_bus.get(ROLLOUTS, large.seq)).data) == SIZE


async def test_a_head_where_none_can_be_is_bad_data_and_ends_no_reader(nats_bus: NatsBus) -> None:
    score = subjects.event("score", "run", "live", "math")
    head = msgspec.msgpack.encode([[], 0, hashlib.sha256(b"").digest()])
    for name in ("rl.blob.score.run.math." + 32 * "0", "rl.blob.score.run." + 32 * "0"):
        ack = await nats_bus.publish(score, head, msg_id=name, headers={"Lachesis-Large": name})
        with pytest.raises(DataError, match="no chunks of it"):
            await nats_bus.get(EVENTS, ack.seq)
        last = await nats_bus.last(EVENTS, score)
        assert last is not None
        assert (last.seq, "no chunks of it" in last.headers["Lachesis-Broken"]) == (ack.seq, True)
    async with nats_bus.read(EVENTS, [], follow=False) as reader:
        assert ["Lachesis-Broken" in m.headers async for m in reader] == [True, True]


async def test_logprobs_may_be_large_in_their_own_stream(nats_bus: NatsBus) -> None:
    subject = subjects.logprobs("run", "live", "math")
    data = [os.urandom(SIZE) for _ in range(2)]
    seqs = [(await nats_bus.publish_large(subject, d, msg_id=str(i))).seq for i, d in enumerate(data)]
    assert [m.data async for m in nats_bus.fetch(TEACHER, seqs)] == data
    assert await nats_bus.trim(TEACHER, [subject], before=seqs[1]) == 1
    assert (await nats_bus.usage(TEACHER)).messages == 11
    with pytest.raises(ConfigError, match="only rollout and logprobs"):
        await nats_bus.publish_large(subjects.event("score", "run", "live", "math"), data[0], msg_id="x")


# -- chunks without a head -------------------------------------------------------------------------------------------


class Slow:
    """Stops a producer right before the message of a large one at `place`: a chunk by its number, or the head."""

    def __init__(self, bus: NatsBus, place: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go_on = anyio.Event(), anyio.Event()
        store = bus._publisher.store

        async def stop(subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
            index = headers["Nats-Msg-Id"].rpartition("/")[2] if subject.startswith("rl.blob") else "head"
            if index == str(place):
                self.reached.set()
                await self.go_on.wait()
            return await store(subject, data, headers)

        monkeypatch.setattr(bus._publisher, "store", stop)


async def _unasked(seqs: Sequence[int]) -> None:
    raise AssertionError(f"{seqs} are to be deleted")


async def sweep(bus: NatsBus) -> int:
    before = await bus.missing(ROLLOUTS)
    noted: list[int] = []

    async def note(seqs: Sequence[int]) -> None:
        assert await bus.missing(ROLLOUTS) == before, "noted after the deletion"
        noted.extend(seqs)

    gone = await bus.delete_orphan_chunks(ROLLOUTS, before_ns=time.time_ns() + 10**10, note=note)
    known = {seq for first, last in before or [] for seq in range(first, last + 1)}
    missing = {seq for first, last in await bus.missing(ROLLOUTS) or [] for seq in range(first, last + 1)}
    assert missing - known <= set(noted)
    assert len(noted) == gone
    return gone


@pytest.mark.parametrize("place", [1, 9, "head"])
async def test_a_producer_slower_than_the_sweep_sends_its_chunks_again(
    nats_bus: NatsBus, nats_server: EmbeddedServer, place: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, other = os.urandom(SIZE), os.urandom(SIZE)
    kept = await nats_bus.publish_large(MATH, other, msg_id="other")
    async with await connect(nats_server.url, run="run", name="slow", token=nats_server.token) as producer:
        slow = Slow(producer, place, monkeypatch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: producer.publish_large(MATH, data, msg_id="slow"))
            await slow.reached.wait()
            young_ns = time.time_ns() - 10**12
            assert await nats_bus.delete_orphan_chunks(ROLLOUTS, before_ns=young_ns, note=_unasked) == 0
            assert await sweep(nats_bus) == (10 if place == "head" else int(place)) + 1  # and what kept the head out
            slow.go_on.set()
    assert await sweep(nats_bus) == 0
    assert await chunks(nats_bus) == 20
    last = await nats_bus.last(ROLLOUTS, MATH)
    assert last is not None
    assert last.data == data
    assert (await nats_bus.get(ROLLOUTS, kept.seq)).data == other


async def test_a_head_stored_while_the_sweep_looks_keeps_its_chunks(
    nats_bus: NatsBus, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(SIZE)
    async with await connect(nats_server.url, run="run", name="slow", token=nats_server.token) as producer:
        slow = Slow(producer, "head", monkeypatch)
        done = anyio.Event()
        listed = trimming._listed

        async def look(*args: Any, **kwargs: Any) -> set[str]:
            found: set[str] = await listed(*args, **kwargs)
            slow.go_on.set()  # right after the sweep has seen no head
            await done.wait()
            return found

        async def publish() -> None:
            await producer.publish_large(MATH, data, msg_id="slow")
            done.set()

        monkeypatch.setattr(trimming, "_listed", look)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish)
            await slow.reached.wait()
            assert await sweep(nats_bus) == 0
    last = await nats_bus.last(ROLLOUTS, MATH)
    assert last is not None
    assert last.data == data


async def test_a_sweep_that_was_cut_short_is_finished_by_the_next(nats_bus: NatsBus) -> None:
    name = subjects.blob("rollout", "run", "math", 32 * "a")
    await nats_bus.publish(name, b"chunk", msg_id=f"{name}/0")
    await nats_bus.publish(name, b"", msg_id=f"{name}/swept")  # and then it died
    assert await sweep(nats_bus) == 2
    assert (await nats_bus.usage(ROLLOUTS)).messages == 0


async def test_large_and_small_in_one_fetch(nats_bus: NatsBus) -> None:
    data = [os.urandom(SIZE if i % 7 == 0 else 4 << 20 if i % 3 == 0 else 100) for i in range(20)]
    seqs = [(await nats_bus.publish_large(MATH, d, msg_id=str(i))).seq for i, d in enumerate(data)]
    assert [m.data async for m in nats_bus.fetch(ROLLOUTS, seqs)] == data
    assert [m.data async for m in nats_bus.fetch(ROLLOUTS, seqs, MATH)] == data  # more than one request may bring
    async with nats_bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert [m.data async for m in reader] == data


@pytest.mark.slow
async def test_a_large_message_survives_a_restart_in_the_middle(
    fresh_server: EmbeddedServer, streams_config: StreamsConfig
) -> None:
    data = os.urandom(40 << 20)
    async with await connect(fresh_server.url, run="run", name="test", token=fresh_server.token) as bus:
        await bus.ensure_streams(streams_config)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: bus.publish_large(MATH, data, msg_id="1"))
            with anyio.fail_after(60):
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
            with anyio.fail_after(60):
                held.append(await anext(deliveries))
            assert len(held) == 2, following
        await held.pop().ack()
        with anyio.move_on_after(0.3) as waiting:
            await anext(deliveries)
        assert waiting.cancelled_caught, "the largest one comes only when nothing else is held"
        await held.pop().ack()
        with anyio.fail_after(60):
            assert len((await anext(deliveries)).message.data) == 3 * SIZE
