"""Single losses, one at a time and on purpose: an answer, a consumer, a queue that waits."""

from contextlib import aclosing

import anyio
import pytest
from nats.aio.msg import Msg

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import Delivery
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.server_link import AnswerSeries
from lachesis.pipeline.errors import FencedError
from lachesis.schemas import keys, subjects
from lachesis.schemas.subjects import LEDGER, LIVE, ROLLOUTS, stream_name

MATH = subjects.rollout("run", "math")
ALL = subjects.rollout("run")
STATE = subjects.state("run", "normalizer", LIVE, "math")


@pytest.fixture
async def lossy(nats_bus: NatsBus, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A bus whose next answers can be lost: `lossy.lose = n` drops n of them after the server has acted."""
    config = ConnectionConfig(ack_timeout_s=0.2)
    async with await connect(nats_server.url, run="run", name="lossy", token=nats_server.token, config=config) as bus:
        ask = bus._link.request_once
        bus.lose = 0  # type: ignore[attr-defined]

        async def losing(*args: object, **options: object) -> Msg | None:
            msg = await ask(*args, **options)  # type: ignore[arg-type]
            if bus.lose:  # type: ignore[attr-defined]
                bus.lose -= 1  # type: ignore[attr-defined]
                return None
            return msg

        monkeypatch.setattr(bus._link, "request_once", losing)
        yield bus


async def test_a_lost_acknowledgement_stores_once(lossy: NatsBus, nats_bus: NatsBus) -> None:
    lossy.lose = 3  # type: ignore[attr-defined]
    ack = await lossy.publish(MATH, b"x", msg_id="1")
    assert (ack.seq, ack.duplicate) == (1, True)
    assert (await nats_bus.usage(ROLLOUTS)).messages == 1


async def test_a_lost_commit_is_settled_as_ours(lossy: NatsBus, nats_bus: NatsBus) -> None:
    seq = await lossy.commit(STATE, b"0", expected=0, msg_id="a-0")
    lossy.lose = 2  # type: ignore[attr-defined]
    after = await lossy.commit(STATE, b"1", expected=seq, msg_id="a-1")
    assert after == seq + 1
    assert (await nats_bus.usage(LEDGER)).messages == 2


async def test_a_lost_commit_that_was_overtaken_is_fenced(
    lossy: NatsBus, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, overtaken = lossy._link.request_once, False

    async def overtake(subject: str, *args: object, **options: object) -> Msg | None:
        nonlocal overtaken
        msg = await ask(subject, *args, **options)  # type: ignore[arg-type]
        if overtaken:
            return msg
        overtaken = True
        await nats_bus.commit(STATE, b"foreign", expected=1, msg_id="b-1")
        return None

    monkeypatch.setattr(lossy._link, "request_once", overtake)
    with pytest.raises(FencedError):
        await lossy.commit(STATE, b"ours", expected=0, msg_id="a-0")


async def test_a_commit_after_messages_that_were_deleted_blames_no_other_writer(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "BELIEVE_LOSS_S", 0.1)
    seq = await nats_bus.commit(STATE, b"0", expected=0, msg_id="a-0")
    await nats_bus._link.nc.jetstream().purge_stream(stream_name("run", LEDGER), subject=STATE)
    with pytest.raises(FencedError, match=f"nothing is left there, and {seq} was the last: it was deleted"):
        await nats_bus.commit(STATE, b"1", expected=seq, msg_id="a-1")


async def test_a_reader_whose_consumer_vanishes_goes_on(nats_bus: NatsBus) -> None:
    js, stream = nats_bus._link.nc.jetstream(), stream_name("run", ROLLOUTS)
    for i in range(600):
        await nats_bus.publish(MATH, bytes(1000), msg_id=str(i))
    seen = []
    async with nats_bus.read(ROLLOUTS, [ALL], max_bytes=50_000) as reader:
        async for message in reader:
            seen.append(message.seq)
            if message.seq % 100 == 0:
                for consumer in await js.consumers_info(stream):
                    await js.delete_consumer(stream, consumer.name)
            if message.seq == 600:
                break
    assert seen == list(range(1, 601))


async def test_a_reader_that_was_sent_a_gap_notices(nats_bus: NatsBus) -> None:
    for i in range(300):
        await nats_bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with nats_bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        accept, dropped = reader.pull._accept, []  # type: ignore[attr-defined]

        def losing(msg: Msg) -> bool:
            if msg.data in (b"100", b"200") and msg.data not in dropped:
                dropped.append(msg.data)
                return False  # as if it had been lost on the way
            return bool(accept(msg))

        reader.pull._accept = losing  # type: ignore[attr-defined]
        assert [m.seq async for m in reader] == list(range(1, 301))
    assert dropped == [b"100", b"200"]


async def test_a_durable_consumer_that_vanishes_is_made_again(nats_bus: NatsBus) -> None:
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        await nats_bus.publish(MATH, b"1", msg_id="1")
        await (await anext(deliveries)).ack()
        await nats_bus._link.nc.jetstream().delete_consumer(stream_name("run", ROLLOUTS), "scorer")
        await nats_bus.publish(MATH, b"2", msg_id="2")
        with anyio.fail_after(60):
            while (await anext(deliveries)).message.data != b"2":
                pass


async def test_what_waits_in_the_queue_is_kept_alive(nats_bus: NatsBus) -> None:
    """One replica is slow with the first message; the prefetched rest must not be redelivered meanwhile."""
    for i in range(10):
        await nats_bus.publish(MATH, b"%d" % i, msg_id=str(i))
    got: list[Delivery] = []
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL], ack_wait_s=4) as deliveries:
        got.append(await anext(deliveries))
        for _ in range(6):
            await anyio.sleep(1.0)
            await got[0].in_progress()
        got += [await anext(deliveries) for _ in range(9)]
        for delivery in got:
            await delivery.ack()
        assert [d.attempt for d in got] == [1] * 10
        assert (await nats_bus.lag(ROLLOUTS, "scorer")).redelivered == 0


async def test_messages_without_metadata_do_no_harm(nats_bus: NatsBus) -> None:
    """Somebody publishes into a pull's inbox; the pull goes on."""
    async with nats_bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        await anyio.sleep(0.05)
        nc = nats_bus._link.nc
        inbox = next(nc._subs[sid].subject for sid, one in nc._handlers.items() if one.__name__ == "_on_message")
        await nats_bus._link.nc.publish(inbox.replace("*", "0"), b"junk")
        await nats_bus.publish(MATH, b"1", msg_id="1")
        with anyio.fail_after(60):
            assert (await anext(deliveries)).message.data == b"1"


async def test_what_is_lost_of_many_answers_is_asked_for_again(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(300):
        await nats_bus.publish(MATH, b"%d" % i, msg_id=str(i))
    add, dropped = AnswerSeries.push, []

    def losing(series: AnswerSeries, msg: Msg) -> None:
        if msg.data in (b"0", b"100", b"299") and msg.data not in dropped:
            dropped.append(msg.data)
        else:
            add(series, msg)

    monkeypatch.setattr(AnswerSeries, "push", losing)
    assert [m.seq async for m in nats_bus.fetch(ROLLOUTS, range(1, 301), MATH)] == list(range(1, 301))
    assert dropped == [b"0", b"100", b"299"]


async def test_nothing_is_left_when_contexts_close(nats_bus: NatsBus) -> None:
    before = set(nats_bus._link.nc._subs)
    for _ in range(5):
        async with nats_bus.consume(ROLLOUTS, "scorer", [ALL]), nats_bus.read(ROLLOUTS, [ALL]):
            pass
        async with nats_bus.listen("rl.heartbeat.>"), nats_bus.watch(keys.POLICY):
            pass
        async with nats_bus.serve(subjects.lease("run", "words"), anyio.sleep):  # type: ignore[arg-type]
            pass
    assert set(nats_bus._link.nc._subs) == before
    assert not nats_bus._link.observers
    await nats_bus.publish(MATH, b"1", msg_id="1")
    await nats_bus.publish(MATH, b"2", msg_id="2")
    async with aclosing(nats_bus.fetch(ROLLOUTS, [1, 2], MATH)) as messages:
        assert (await anext(messages)).seq == 1
    assert not nats_bus._link._requests._waiting
    assert not nats_bus._link._requests._series
