"""One contract, two buses: every case runs in memory and against a real nats-server."""

import os
from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import Bus, Delivery
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.errors import (
    FencedError,
    HistoryLostError,
    InfrastructureError,
    NotFoundError,
    StreamFullError,
    UnservedError,
)
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.subjects import EVENTS, LEDGER, LIVE, ROLLOUTS, TEACHER

MATH = subjects.rollout("run", "math")
CODE = subjects.rollout("run", "code")
ALL = subjects.rollout("run")
STATE = subjects.state("run", "normalizer", LIVE, "math")


def now(bus: Bus) -> float:
    return bus.now() if isinstance(bus, MemoryBus) else anyio.current_time()


async def pass_time(bus: Bus, seconds: float) -> None:
    if isinstance(bus, MemoryBus):
        bus.advance(seconds)
    else:
        await anyio.sleep(seconds)


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(30):
        while not await condition():  # noqa: ASYNC110  # the server's own state cannot be waited for
            await anyio.sleep(0.01)


# -- publish ---------------------------------------------------------------------------------------------------------


async def test_publish_stores_once_for_each_message_id(bus: Bus) -> None:
    first = await bus.publish(MATH, b"a", msg_id="1", headers={"Lachesis-Plan": "plan"})
    again = await bus.publish(MATH, b"other", msg_id="1")
    second = await bus.publish(MATH, b"b", msg_id="2")
    assert (first.stream, first.seq, first.duplicate) == (ROLLOUTS, 1, False)
    assert (again.seq, again.duplicate) == (1, True)
    assert (second.seq, second.duplicate) == (2, False)
    stored = await bus.get(ROLLOUTS, 1)
    assert (stored.subject, stored.data, stored.seq, stored.stream) == (MATH, b"a", 1, ROLLOUTS)
    assert stored.headers == {"Lachesis-Plan": "plan", "Nats-Msg-Id": "1"}
    assert abs(stored.time_ns - (await bus.get(ROLLOUTS, 2)).time_ns) < 10**10


async def test_many_publishers_at_once(bus: Bus) -> None:
    seqs: list[int] = []

    async def publish(i: int) -> None:
        seqs.append((await bus.publish(MATH, b"%d" % i, msg_id=str(i))).seq)

    async with anyio.create_task_group() as tasks:
        for i in range(300):
            tasks.start_soon(publish, i)
    assert sorted(seqs) == list(range(1, 301))
    usage = await bus.usage(ROLLOUTS)
    assert (usage.first, usage.last, usage.messages) == (1, 300, 300)


async def test_empty_stream(bus: Bus) -> None:
    usage = await bus.usage(EVENTS)
    assert (usage.first, usage.last, usage.messages, usage.bytes) == (1, 0, 0, 0)
    assert usage.max_bytes > 0
    assert await bus.last(EVENTS, subjects.event("score", "run", LIVE, "math")) is None


async def test_a_subject_of_no_stream_is_an_error(bus: Bus) -> None:
    with pytest.raises(ConfigError, match=r"belongs to no stream"):
        await bus.publish("rl.nonsense", b"", msg_id="1")
    with pytest.raises(ConfigError):
        await bus.commit("rl.nonsense", b"", expected=0, msg_id="1")


async def test_unknown_streams_are_not_found(bus: Bus) -> None:
    with pytest.raises(NotFoundError):
        await bus.usage("NONE")
    with pytest.raises(NotFoundError):
        await bus.last("NONE", MATH)
    with pytest.raises(NotFoundError):
        async with bus.read("NONE", []):
            pass
    with pytest.raises(NotFoundError):
        async with bus.consume("NONE", "durable", []):
            pass


async def test_a_message_over_the_limit_is_bad_data(bus: Bus) -> None:
    with pytest.raises(DataError, match="bytes where"):
        await bus.publish(MATH, bytes((8 << 20) + 1), msg_id="1")
    assert (await bus.publish(MATH, b"", msg_id="2")).seq == 1  # nothing stuck, and empty data is fine


# -- commit ----------------------------------------------------------------------------------------------------------


async def test_commit_is_fenced(bus: Bus) -> None:
    first = await bus.commit(STATE, b"1", expected=0, msg_id="a-1")
    second = await bus.commit(STATE, b"2", expected=first, msg_id="a-2")
    with pytest.raises(FencedError):
        await bus.commit(STATE, b"stale", expected=first, msg_id="b-2")
    with pytest.raises(FencedError):
        await bus.commit(STATE, b"fresh", expected=0, msg_id="b-1")
    last = await bus.last(LEDGER, STATE)
    assert last is not None
    assert (last.data, last.seq) == (b"2", second)


async def test_a_commit_made_again_is_the_same_commit(bus: Bus) -> None:
    seq = await bus.commit(STATE, b"1", expected=0, msg_id="a-1")
    assert await bus.commit(STATE, b"1", expected=0, msg_id="a-1") == seq
    assert (await bus.usage(LEDGER)).messages == 1


async def test_fences_are_per_subject(bus: Bus) -> None:
    other = subjects.state("run", "normalizer", LIVE, "code")
    await bus.commit(STATE, b"1", expected=0, msg_id="a")
    assert await bus.commit(other, b"1", expected=0, msg_id="b") == 2


async def test_of_racing_writers_one_wins_each_round(bus: Bus) -> None:
    """Eight writers each commit until fenced; what is stored is one chain without a fork."""
    chain: list[str] = []
    tried: set[str] = set()

    async def write(name: str) -> None:
        expected, rounds = 0, 0
        while rounds < 20:
            tried.add(f"{name}-{rounds}")
            try:
                expected = await bus.commit(STATE, name.encode(), expected=expected, msg_id=f"{name}-{rounds}")
            except FencedError:
                last = await bus.last(LEDGER, STATE)
                assert last is not None
                expected = last.seq
            else:
                chain.append(f"{name}-{rounds}")
            rounds += 1

    async with anyio.create_task_group() as tasks:
        for i in range(8):
            tasks.start_soon(write, f"w{i}")
    async with bus.read(LEDGER, [STATE], follow=False) as reader:
        stored = [m.headers["Nats-Msg-Id"] async for m in reader]
    # one that others built upon before its late acknowledgement was requested again is fenced, and stored all the same
    assert set(chain) <= set(stored) <= tried
    assert len(set(stored)) == len(stored) >= 20


# -- consume ---------------------------------------------------------------------------------------------------------


async def test_consume_acknowledges_and_goes_on(bus: Bus) -> None:
    for i in range(10):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        for i in range(4):
            delivery = await anext(deliveries)
            assert (delivery.message.data, delivery.attempt) == (b"%d" % i, 1)
            await delivery.ack()

    async def acked() -> bool:
        return (await bus.lag(ROLLOUTS, "scorer")).ack_floor == 4

    await eventually(acked)
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        seen = set()
        for _ in range(6):
            delivery = await anext(deliveries)
            seen.add(delivery.message.data)
            await delivery.ack()
    assert seen == {b"%d" % i for i in range(4, 10)}


async def test_nak_brings_a_message_again(bus: Bus) -> None:
    await bus.publish(MATH, b"x", msg_id="1")
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        for attempt in range(1, 12):  # for ever, not only a few times
            delivery = await anext(deliveries)
            assert delivery.attempt == attempt
            await delivery.nak()


async def test_nak_with_a_delay_waits(bus: Bus) -> None:
    await bus.publish(MATH, b"x", msg_id="1")
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        first, began = await anext(deliveries), now(bus)
        await first.nak(delay_s=0.6)
        with anyio.move_on_after(0.2):
            await anext(deliveries)
            assert now(bus) - began >= 0.6, "it came before its delay was over"
            return  # and not before: this process was held up
        await pass_time(bus, 0.5)
        with anyio.fail_after(30):
            assert (await anext(deliveries)).attempt == 2
        assert now(bus) - began >= 0.6


async def test_what_is_not_acknowledged_in_time_comes_again(bus: Bus) -> None:
    await bus.publish(MATH, b"x", msg_id="1")
    async with bus.consume(ROLLOUTS, "scorer", [ALL], ack_wait_s=1.0) as deliveries:
        first = await anext(deliveries)
        await pass_time(bus, 1.1)
        with anyio.fail_after(30):
            second = await anext(deliveries)
        assert (first.attempt, second.attempt) == (1, 2)
        assert second.message == first.message
        assert (await bus.lag(ROLLOUTS, "scorer")).redelivered == 1
        await first.ack()  # a late acknowledgement counts


async def test_in_progress_keeps_a_message(bus: Bus) -> None:
    await bus.publish(MATH, b"x", msg_id="1")
    async with bus.consume(ROLLOUTS, "scorer", [ALL], ack_wait_s=5.0) as deliveries:
        delivery = await anext(deliveries)
        for _ in range(6):
            await pass_time(bus, 1.0)
            await delivery.in_progress()
        await delivery.ack()
        with anyio.move_on_after(0.3):
            await anext(deliveries)
            pytest.fail("a message kept alive came again")


async def test_two_replicas_share_the_work(bus: Bus) -> None:
    for i in range(200):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    seen: list[tuple[str, int]] = []
    done = anyio.Event()

    async def replica(name: str) -> None:
        async with bus.consume(ROLLOUTS, "scorer", [ALL], max_messages=10) as deliveries:
            async for delivery in deliveries:
                seen.append((name, delivery.message.seq))
                await anyio.lowlevel.checkpoint()
                await delivery.ack()
                if len(seen) >= 200:
                    done.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(replica, "a")
        tasks.start_soon(replica, "b")
        with anyio.fail_after(40):
            await done.wait()
        tasks.cancel_scope.cancel()
    assert sorted(seq for _, seq in seen) == list(range(1, 201))
    assert {name for name, _ in seen} == {"a", "b"}


async def test_leaving_gives_back_what_was_not_handed_out(bus: Bus) -> None:
    for i in range(20):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with bus.consume(ROLLOUTS, "scorer", [ALL], ack_wait_s=120) as deliveries:
        kept = await anext(deliveries)
        await anyio.sleep(0.1)  # the rest has been prefetched
    with anyio.fail_after(30):  # not after the two minutes of its acknowledgement wait
        async with bus.consume(ROLLOUTS, "scorer", [ALL], ack_wait_s=120) as deliveries:
            seen = {(await anext(deliveries)).message.seq for _ in range(19)}
    assert seen == set(range(1, 21)) - {kept.message.seq}


async def test_a_replica_holds_no_more_than_it_may(bus: Bus) -> None:
    for i in range(10):
        await bus.publish(MATH, bytes(100_000), msg_id=str(i))
    held: list[Delivery] = []

    async def more(deliveries: object, least: int, limit: int) -> int:
        with anyio.fail_after(30):
            while len(held) < least:
                held.append(await anext(deliveries))  # type: ignore[call-overload]
        with anyio.move_on_after(0.3):
            while len(held) < limit:
                held.append(await anext(deliveries))  # type: ignore[call-overload]
        return len(held)

    async with bus.consume(ROLLOUTS, "scorer", [ALL], max_messages=3) as deliveries:
        assert await more(deliveries, 3, 10) == 3
        await held.pop(0).ack()
        assert await more(deliveries, 3, 10) == 3
        for delivery in held:
            await delivery.nak()
        held.clear()
    async with bus.consume(ROLLOUTS, "by-bytes", [ALL], max_bytes=350_000) as deliveries:
        assert await more(deliveries, 3, 10) <= 4
    held.clear()
    async with bus.consume(ROLLOUTS, "tiny", [ALL], max_bytes=50_000) as deliveries:
        for _ in range(10):  # each is larger than the bound: they come one at a time
            assert await more(deliveries, 1, 5) == 1
            await held.pop().ack()


async def test_a_cancelled_wait_loses_nothing(bus: Bus) -> None:
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        for _ in range(3):
            with anyio.move_on_after(0.02):
                await anext(deliveries)
        await bus.publish(MATH, b"x", msg_id="1")
        with anyio.fail_after(30):
            assert (await anext(deliveries)).message.data == b"x"


async def test_lag(bus: Bus) -> None:
    with pytest.raises(NotFoundError):
        await bus.lag(ROLLOUTS, "nobody")
    for i in range(5):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with bus.consume(ROLLOUTS, "scorer", [ALL], max_messages=2) as deliveries:
        first, _second = await anext(deliveries), await anext(deliveries)
        lag = await bus.lag(ROLLOUTS, "scorer")
        assert (lag.pending, lag.unacked, lag.redelivered, lag.ack_floor) == (3, 2, 0, 0)
        await first.ack()

        async def floor_rose() -> bool:
            return (await bus.lag(ROLLOUTS, "scorer")).ack_floor == 1

        await eventually(floor_rose)


async def test_extent(bus: Bus) -> None:
    extent = await bus.extent(ROLLOUTS, MATH)
    assert (extent.last, extent.messages) == (0, 0)
    for i in range(5):
        await bus.publish(CODE if i % 2 else MATH, b"%d" % i, msg_id=str(i))
    found = [await bus.extent(ROLLOUTS, subject) for subject in (MATH, CODE, ALL, subjects.promotion("run", LIVE))]
    assert [(extent.last, extent.messages) for extent in found] == [(5, 3), (5, 2), (5, 5), (5, 0)]
    with pytest.raises(NotFoundError):
        await bus.extent("NONE", MATH)


async def test_an_error_in_the_body_comes_out_as_itself(bus: Bus) -> None:
    with pytest.raises(FencedError):
        async with bus.consume(ROLLOUTS, "scorer", [ALL]):
            raise FencedError("as it is")
    with pytest.raises(FencedError):
        async with bus.read(ROLLOUTS, [ALL]):
            raise FencedError("as it is")


# -- read ------------------------------------------------------------------------------------------------------------


async def test_read_from_a_cursor(bus: Bus) -> None:
    for i in range(50):
        await bus.publish(MATH if i % 2 else CODE, b"%d" % i, msg_id=str(i))
    async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert not reader.caught_up
        assert [m.seq async for m in reader] == list(range(1, 51))
        assert reader.caught_up
    async with bus.read(ROLLOUTS, [ALL], start=41, follow=False) as reader:
        assert [(m.seq, m.data) async for m in reader] == [(i + 1, b"%d" % i) for i in range(40, 50)]
    async with bus.read(ROLLOUTS, [CODE], start=2, follow=False) as reader:
        assert [m.seq async for m in reader] == list(range(3, 51, 2))
    async with bus.read(ROLLOUTS, [MATH, CODE], start=49, follow=False) as reader:
        assert [m.subject async for m in reader] == [CODE, MATH]


async def test_read_follows(bus: Bus) -> None:
    await bus.publish(MATH, b"0", msg_id="0")
    async with bus.read(ROLLOUTS, [ALL]) as reader:
        assert (await anext(reader.__aiter__())).data == b"0"
        assert reader.caught_up
        for i in range(1, 4):
            await bus.publish(MATH, b"%d" % i, msg_id=str(i))
            with anyio.fail_after(30):
                assert (await anext(reader.__aiter__())).data == b"%d" % i
        assert reader.caught_up


async def test_who_gathers_reads_all_in_order_too(bus: Bus) -> None:
    for i in range(600):  # more than one request may bring
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with bus.read(ROLLOUTS, [MATH], gather_s=0.2) as reader:
        with anyio.fail_after(60):
            assert [int((await anext(reader)).data) for _ in range(600)] == list(range(600))
            for i in range(3):
                await bus.publish(MATH, b"later", msg_id=f"later {i}")
                assert (await anext(reader)).data == b"later"
            assert reader.caught_up


async def test_read_of_what_is_not_there(bus: Bus) -> None:
    async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert [m async for m in reader] == []
    await bus.publish(MATH, b"0", msg_id="0")
    for start, filters in ((2, [ALL]), (2, [CODE]), (1, [CODE])):
        async with bus.read(ROLLOUTS, filters, start=start, follow=False) as reader:
            with anyio.fail_after(30):
                assert [m async for m in reader] == []
            assert reader.caught_up


async def test_a_cursor_beyond_the_end_says_that_history_was_lost(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "BELIEVE_LOSS_S", 0.1)
    await bus.publish(MATH, b"0", msg_id="0")
    for follow in (True, False):
        with pytest.raises(HistoryLostError, match="but 2 was read already"):
            async with bus.read(ROLLOUTS, [ALL], start=3, follow=follow):
                pass


async def test_read_without_follow_ends_while_others_publish(bus: Bus) -> None:
    for i in range(100):
        await bus.publish(MATH, b"", msg_id=str(i))

    async def keep_publishing() -> None:
        for i in range(100, 1_000_000):
            await bus.publish(MATH, b"", msg_id=str(i))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_publishing)
        with anyio.fail_after(40):
            async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
                seqs = [m.seq async for m in reader]
        tasks.cancel_scope.cancel()
    assert seqs == list(range(1, len(seqs) + 1))
    assert len(seqs) >= 100


@pytest.mark.slow
async def test_read_more_than_its_bounds(bus: Bus) -> None:
    async with anyio.create_task_group() as tasks:
        for i in range(1500):
            tasks.start_soon(lambda i: bus.publish(MATH, bytes(3000), msg_id=str(i)), i)
    async with bus.read(ROLLOUTS, [ALL], follow=False, max_bytes=100_000) as reader:
        assert [m.seq async for m in reader] == list(range(1, 1501))


async def test_headers_only(bus: Bus) -> None:
    for i in range(3):
        await bus.publish(MATH, bytes(1000), msg_id=str(i), headers={"Lachesis-Plan": str(i)})
    async with bus.read(ROLLOUTS, [ALL], headers_only=True, follow=False) as reader:
        assert [(m.data, m.headers) async for m in reader] == [
            (b"", {"Lachesis-Plan": str(i), "Nats-Msg-Id": str(i), "Nats-Msg-Size": "1000"}) for i in range(3)
        ]


async def test_fetch_keeps_the_order_asked_for(bus: Bus) -> None:
    for i in range(1, 101):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    order = [*range(1, 101, 3), 7, 7, *range(100, 0, -1)]
    assert [m.data async for m in bus.fetch(ROLLOUTS, order)] == [b"%d" % i for i in order]
    assert [m async for m in bus.fetch(ROLLOUTS, [])] == []
    with pytest.raises(NotFoundError, match="101"):
        _ = [m async for m in bus.fetch(ROLLOUTS, [1, 101, 2])]
    with pytest.raises(NotFoundError):
        await bus.get(ROLLOUTS, 4000)


@pytest.mark.parametrize("step", [1, 2, 7, 90])
async def test_fetch_of_what_lies_on_one_subject(bus: Bus, step: int) -> None:
    for i in range(1, 201):
        await bus.publish(MATH if i % 2 else CODE, b"%d" % i, msg_id=str(i))
    wanted = range(3, 200, 2 * step)
    assert [m.data async for m in bus.fetch(ROLLOUTS, wanted, MATH)] == [b"%d" % i for i in wanted]
    mixed = range(2, 201, step)
    assert [(m.seq, m.subject) async for m in bus.fetch(ROLLOUTS, mixed, ALL)] == [
        (i, MATH if i % 2 else CODE) for i in mixed
    ]
    assert [m async for m in bus.fetch(ROLLOUTS, [], MATH)] == []
    with pytest.raises(NotFoundError, match="201"):
        _ = [m async for m in bus.fetch(ROLLOUTS, [197, 199, 201], MATH)]
    await bus.trim(ROLLOUTS, [MATH], before=50)
    with pytest.raises(NotFoundError, match="49"):
        _ = [m async for m in bus.fetch(ROLLOUTS, [49, 51], MATH)]


# -- large messages --------------------------------------------------------------------------------------------------


async def test_large_messages_are_one_message(bus: Bus) -> None:
    large, small = os.urandom((9 << 20) + 12_345), b"small"
    first = await bus.publish_large(MATH, large, msg_id="large", headers={"Lachesis-Plan": "p"})
    again = await bus.publish_large(MATH, large, msg_id="large")
    second = await bus.publish_large(MATH, small, msg_id="small")
    assert again.duplicate
    assert again.seq == first.seq < second.seq
    message = await bus.get(ROLLOUTS, first.seq)
    assert message.data == large
    assert message.headers == {"Lachesis-Plan": "p", "Nats-Msg-Id": "large"}
    head = await bus.get_head(ROLLOUTS, first.seq)
    assert (head.seq, head.subject, head.time_ns) == (message.seq, MATH, message.time_ns)
    assert head.headers["Lachesis-Plan"] == "p"
    last = await bus.last(ROLLOUTS, MATH)
    assert last is not None
    assert last.data == small
    assert [m.data async for m in bus.fetch(ROLLOUTS, [first.seq, second.seq])] == [large, small]
    async with bus.consume(ROLLOUTS, "scorer", [ALL]) as deliveries:
        assert [(await anext(deliveries)).message.data for _ in range(2)] == [large, small]
    async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert [m.data async for m in reader] == [large, small]
    async with bus.read(ROLLOUTS, [ALL], headers_only=True, follow=False) as reader:
        assert [(m.seq, m.headers["Nats-Msg-Id"]) async for m in reader] == [
            (first.seq, "large"),
            (second.seq, "small"),
        ]


# -- budgets ---------------------------------------------------------------------------------------------------------


async def test_a_full_stream_refuses_and_recovers(bus: Bus) -> None:
    subject = subjects.logprobs("run", LIVE, "math")
    stored = 0
    with pytest.raises(StreamFullError):  # noqa: PT012
        for i in range(1000):
            stored = (await bus.publish(subject, bytes(1 << 20), msg_id=str(i))).seq
    assert 55 <= stored <= 64
    usage = await bus.usage(TEACHER)
    assert usage.bytes <= usage.max_bytes
    with pytest.raises(StreamFullError):
        await bus.commit(subject, bytes(1 << 20), expected=stored, msg_id="commit")
    assert (await bus.publish(subject, bytes(1 << 20), msg_id=str(stored - 1))).duplicate  # known, so not refused
    await bus.publish(MATH, b"", msg_id="1")  # other streams are not concerned
    assert await bus.trim(TEACHER, [subjects.logprobs("run", LIVE)], before=11) == 10
    assert (await bus.usage(TEACHER)).first == 11
    assert (await bus.publish(subject, bytes(1 << 20), msg_id="refused before")).seq == stored + 1


async def test_a_consumer_goes_on_past_what_was_trimmed_under_it(bus: Bus) -> None:
    for i in range(1, 11):
        await bus.publish(MATH, b"%d" % i, msg_id=str(i))
    async with bus.consume(ROLLOUTS, "scorer", [ALL], max_messages=3, ack_wait_s=1.0) as deliveries:
        held = [await anext(deliveries) for _ in range(3)]
        assert await bus.trim(ROLLOUTS, [ALL], before=6) == 5
        await held[0].nak()
        await held[1].ack()
        await pass_time(bus, 1.1)
        with anyio.fail_after(30):
            seen: set[int] = set()
            while not seen >= {6, 7, 8, 9, 10}:  # those before come again where trimming takes longer than `ack_wait_s`
                delivery = await anext(deliveries)
                seen.add(delivery.message.seq)
                await delivery.ack()

    async def nothing_left() -> bool:
        lag = await bus.lag(ROLLOUTS, "scorer")
        return (lag.pending, lag.unacked) == (0, 0) and lag.ack_floor >= 10

    await eventually(nothing_left)


async def test_trimming_leaves_the_last_of_every_subject(bus: Bus) -> None:
    for i in range(10):
        await bus.publish(MATH if i < 5 else CODE, b"%d" % i, msg_id=str(i))
    assert await bus.trim(ROLLOUTS, [ALL], before=100) == 8
    async with bus.read(ROLLOUTS, [ALL], follow=False) as reader:
        assert [m.seq async for m in reader] == [5, 10]
    with pytest.raises(NotFoundError):
        await bus.get(ROLLOUTS, 4)
    assert await bus.trim(ROLLOUTS, [subjects.rollout("other")], before=100) == 0
    for before in (-1, 0, 1, 5):
        assert await bus.trim(ROLLOUTS, [ALL], before=before) == 0
    assert (await bus.usage(ROLLOUTS)).messages == 2


# -- key-value -------------------------------------------------------------------------------------------------------


async def test_key_value_compare_and_set(bus: Bus) -> None:
    assert await bus.value("run") is None
    first = await bus.put("run", b"1", revision=0)
    with pytest.raises(FencedError):
        await bus.put("run", b"again", revision=0)
    second = await bus.put("run", b"2", revision=first)
    with pytest.raises(FencedError):
        await bus.put("run", b"3", revision=first)
    third = await bus.put("run", b"3")
    assert first < second < third
    entry = await bus.value("run")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("run", b"3", third)
    assert await bus.value("other.key") is None
    for bad in ("", "a b", "a..b", "*", "a.>"):
        with pytest.raises(ConfigError):
            await bus.put(bad, b"")


async def test_a_deleted_key_is_gone_and_takes_no_room(bus: Bus) -> None:
    await bus.delete("run")  # not there: nothing to do
    first = await bus.put("run", b"1")
    await bus.put("other", b"2")
    await bus.delete("run")
    assert await bus.value("run") is None
    if not isinstance(bus, MemoryBus):
        with anyio.fail_after(60):
            while (await bus.usage(subjects.BUCKET)).messages > 1:  # noqa: ASYNC110 - the server forgets the mark by itself
                await anyio.sleep(0.1)
    with pytest.raises(FencedError):
        await bus.put("run", b"3", revision=first)
    assert await bus.put("run", b"3", revision=0) > first
    assert await bus.value("other") is not None
    assert await bus.stored_keys() == ["other", "run"]
    for bad in ("", "*", "a.>"):
        with pytest.raises(ConfigError):
            await bus.delete(bad)


async def test_a_large_value(bus: Bus) -> None:
    value = os.urandom(4 << 20)  # the weights of a million items
    await bus.put("run", value)
    entry = await bus.value("run")
    assert entry is not None
    assert entry.value == value


async def test_watch_yields_the_newest(bus: Bus) -> None:
    await bus.put("run", b"0")
    await bus.put("run", b"1")
    await bus.put("other", b"x")
    async with bus.watch("run") as entries, bus.watch("new") as fresh:
        with anyio.fail_after(30):
            assert (await anext(entries)).value == b"1"
            with anyio.move_on_after(0.05):
                await anext(entries)
                pytest.fail("nothing has changed")
            for i in range(2, 50):
                await bus.put("run", b"%d" % i)
            seen = [(await anext(entries)).value]
            while seen[-1] != b"49":  # it may still be on its way
                seen.append((await anext(entries)).value)
            assert len(seen) < 10, "those in between are passed over"
            await bus.put("new", b"n")
            assert (await anext(fresh)).value == b"n"


# -- not stored ------------------------------------------------------------------------------------------------------


async def test_request_and_serve(bus: Bus) -> None:
    subject = subjects.lease("run", "words")

    async def answer(data: bytes) -> bytes:
        if data == b"bad":
            raise DataError("no such thing")
        if data == b"busy":
            raise InfrastructureError("try later")
        if data == b"slow":
            await anyio.sleep(0.5)
        return data[::-1]

    with pytest.raises(UnservedError, match="no process serves"):
        await bus.request(subject, b"abc", timeout_s=30)
    async with bus.serve(subject, answer):
        assert await bus.request(subject, b"abc", timeout_s=30) == b"cba"
        assert await bus.request(subject, b"", timeout_s=30) == b""
        with pytest.raises(DataError, match="no such thing"):
            await bus.request(subject, b"bad", timeout_s=30)
        with pytest.raises(InfrastructureError, match="try later"):
            await bus.request(subject, b"busy", timeout_s=30)
        with pytest.raises(InfrastructureError, match="no answer"):
            await bus.request(subject, b"slow", timeout_s=0.1)
        assert await bus.request(subject, b"abc", timeout_s=30) == b"cba"
    with pytest.raises(UnservedError, match="no process serves"):
        await bus.request(subject, b"abc", timeout_s=30)


async def test_a_service_may_answer_several_requests_at_once(bus: Bus) -> None:
    subject, released = subjects.lease("run", "words"), anyio.Event()

    async def answer(data: bytes) -> bytes:
        if data == b"waits":
            await released.wait()
        return data

    async def wait() -> None:
        answers.append(await bus.request(subject, b"waits", timeout_s=30))

    answers: list[bytes] = []
    async with bus.serve(subject, answer, at_once=3), anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(wait)
        for _ in range(3):
            assert await bus.request(subject, b"quick", timeout_s=30) == b"quick"
        assert not answers
        released.set()
    assert answers == [b"waits"] * 2


async def test_a_service_that_fails_ends_its_context(bus: Bus) -> None:
    async def answer(data: bytes) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with bus.serve(subjects.lease("run", "words"), answer):
            with pytest.raises(InfrastructureError):
                await bus.request(subjects.lease("run", "words"), b"", timeout_s=0.2)
            await anyio.sleep(30)


async def test_broadcast_and_listen(bus: Bus) -> None:
    subject = subjects.heartbeat("run", "scorer", "1")
    await bus.broadcast(subject, b"unheard")
    async with bus.listen(subjects.heartbeat("run")) as beats, bus.listen(subject, limit=4) as few:
        for i in range(10):
            await bus.broadcast(subject, b"%d" % i)
        await bus.broadcast(subjects.heartbeat("other", "scorer", "1"), b"elsewhere")
        with anyio.fail_after(30):
            heard = [await anext(beats) for _ in range(10)]
            await anyio.sleep(0.1)
            assert [(await anext(few)).data for _ in range(4)] == [b"6", b"7", b"8", b"9"]
        assert [m.data for m in heard] == [b"%d" % i for i in range(10)]
        assert (heard[0].subject, heard[0].stream, heard[0].seq) == (subject, "", 0)
