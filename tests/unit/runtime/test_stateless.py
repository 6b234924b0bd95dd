"""The stateless runtime: what is stored before what is acknowledged, and what happens when something fails or dies."""

import itertools

import anyio
import msgspec
import pytest

from lachesis.pipeline.errors import InfrastructureError, StreamFullError
from lachesis.pipeline.runtime.stateless import StatelessStage, run_stateless
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.messages import process_id
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import DeadLetter, GroupScore, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import StageIncident
from lachesis.schemas.errors import DataError
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

DURABLE = subjects.durable("stage", "r", subjects.LIVE)


def a_stage(handle, **settings):
    """A stage that scores; `handle` may raise, wait or change the score it is given. No pause brings a group again."""

    async def score(rollout):
        base = GroupScore(
            group=rollout.group.id, seq=rollout.seq, item=rollout.group.item, policy_step=0, scores=[1.0, 0.0],
            ratings={}, lengths=[3, 3],
        )  # fmt: skip
        return await handle(rollout) or base

    def event(env, groups):
        return ScoreEvent(run="r", env=env, revision=subjects.LIVE, ensemble="e", raters={}, groups=groups)

    def stamp(item, times):
        return msgspec.structs.replace(item, stamps=[times])

    stage = StatelessStage(kind="score", handle=score, event=event, stamp=stamp, **{"ack_wait_s": 30.0} | settings)
    return lambda service: run_stateless(service, stage)


async def nothing(_):
    return None


class Kept:
    """A sink that keeps what it gets."""

    traces, dropped, problem = True, 0, None

    def __init__(self):
        self.spans = []

    def emit(self, spans):
        self.spans += spans

    def observe(self, figures):
        pass


async def open_messages(lab):
    lag = await lab.bus.lag(subjects.ROLLOUTS, DURABLE)
    return lag.pending + lag.unacked


def settled(lab, count):
    """Whether `count` groups are scored or dead, and none is open."""

    async def condition():
        scored = sum(len(event.groups) for event in await lab.events("score", ScoreEvent))
        return scored + len(await lab.events("dead", DeadLetter)) >= count and not await open_messages(lab)

    return condition


async def test_an_annotation_is_stored_before_its_group_is_acknowledged(lab, monkeypatch):
    seen = []
    publish = lab.bus.publish

    async def watched(subject, *args, **kwargs):
        seen.append((await lab.bus.lag(subjects.ROLLOUTS, DURABLE)).unacked)
        ack = await publish(subject, *args, **kwargs)
        seen.append((await lab.bus.lag(subjects.ROLLOUTS, DURABLE)).unacked)
        return ack

    monkeypatch.setattr(lab.bus, "publish", watched)
    await lab.store(lab.group(1))
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 1))
    assert seen == [1, 1]


async def test_what_is_ready_leaves_together_and_one_alone_at_once(lab, monkeypatch):
    gate = anyio.Event()
    publish = lab.bus.publish

    async def slow(*args, **kwargs):
        await gate.wait()
        return await publish(*args, **kwargs)

    handled = []

    async def handle(rollout):
        handled.append(rollout.seq)

    monkeypatch.setattr(lab.bus, "publish", slow)
    async with lab.running(a_stage(handle)) as service:
        await lab.store(lab.group(1))
        await lab.until(lambda: _true(service.vitals.handled == 1))  # it is being published by now, alone
        for n in range(2, 7):
            await lab.store(lab.group(n))
        await lab.until(lambda: _true(len(handled) == 6))
        gate.set()
        await lab.until(settled(lab, 6))
    assert [len(event.groups) for event in await lab.events("score", ScoreEvent)] == [1, 5]


async def _true(value):
    return value


async def test_environments_do_not_share_messages(lab, monkeypatch):
    gate = anyio.Event()
    publish = lab.bus.publish

    async def slow(*args, **kwargs):
        await gate.wait()
        return await publish(*args, **kwargs)

    monkeypatch.setattr(lab.bus, "publish", slow)
    for n, env in enumerate(["sums", "words", "sums", "words"]):
        await lab.store(lab.group(n, env=env))
    async with lab.running(a_stage(nothing)) as service:
        await lab.until(lambda: _true(service.vitals.handled == 4))
        gate.set()
        await lab.until(lambda: _true(service.vitals.emitted == 4))
    for env, numbers in (("sums", {0, 2}), ("words", {1, 3})):
        scored = {item.group for event in await lab.events("score", ScoreEvent, env) for item in event.groups}
        assert scored == {f"{n:032x}" for n in numbers}


async def test_a_bad_group_becomes_one_dead_letter_and_the_service_goes_on(lab):
    async def handle(rollout):
        if rollout.group.item == "item-2":
            raise DataError("no such answer")

    seqs = [await lab.store(lab.group(n)) for n in (1, 2, 3)]
    async with lab.running(a_stage(handle)) as service:
        await lab.until(settled(lab, 3))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.stream, letter.seq, letter.group, letter.kind) == (subjects.ROLLOUTS, seqs[1], f"{2:032x}", "data")
    assert letter.reason == "DataError: no such answer"
    assert (service.vitals.dead, service.vitals.emitted, service.vitals.in_flight) == (1, 2, 0)


async def test_an_unreadable_message_becomes_a_dead_letter_that_names_where_it_lies(lab):
    await lab.store(lab.group(1))
    await lab.bus.publish(subjects.rollout("r", "sums"), b"\xc1 no msgpack", msg_id="x")
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 2))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.stream, letter.seq, letter.group) == (subjects.ROLLOUTS, 2, None)
    assert letter.leased is False, "it counts against nobody"


@pytest.mark.parametrize(
    ("changes", "header"),
    [
        pytest.param({"env": "words"}, ..., id="another environment"),
        pytest.param({"env": "a.b > *"}, ..., id="an environment that is no token"),
        pytest.param({"run": "other"}, ..., id="another run"),
        pytest.param({}, None, id="no plan"),
        pytest.param({"id": f"{9:032x}"}, "own", id="a plan of another group"),
        pytest.param({"samples": 3}, "own", id="a plan that lies about its weight"),
    ],
)
async def test_a_group_that_contradicts_its_envelope_is_a_dead_letter(lab, changes, header):
    honest = lab.group(1)
    lying = lab.group(1, **changes)
    plan = None if header is None else Plan.of(honest if header == "own" else lying).pack()
    headers = {PLAN_HEADER: plan} if plan else {}
    await lab.bus.publish(subjects.rollout("r", "sums"), encode(lying), msg_id="x", headers=headers)
    await lab.store(lab.group(2))
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 2))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.seq, letter.env, letter.kind) == (1, "sums", "data")


async def test_a_failing_dependency_is_waited_for_and_never_becomes_a_result(lab):
    down = True
    tries = 0

    async def handle(_):
        nonlocal tries
        tries += 1
        if down:
            raise InfrastructureError("connection refused")

    await lab.store(lab.group(1))
    async with lab.running(a_stage(handle)) as service:
        await lab.until(lambda: _true(tries >= 4))
        assert service.vitals.state == "waiting"
        assert "connection refused" in service.vitals.status_text
        assert not await lab.events("score", ScoreEvent)
        down = False
        await lab.until(settled(lab, 1))
        assert (service.vitals.state, service.vitals.status_text) == ("ok", None)
    assert not await lab.events("dead", DeadLetter)
    assert service.vitals.retried >= 3


async def test_what_a_failing_dependency_holds_up_is_given_back_and_what_lies_behind_goes_on(lab):
    down = True

    async def handle(rollout):
        if down and rollout.group.item != "item-3":
            raise InfrastructureError("the judge is away")

    for n in (1, 2, 3):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(handle, concurrency=1, patience_s=0.0)) as service:
        await lab.until(lambda: _true(service.vitals.emitted == 1))
        for _ in range(7):
            given_back = service.vitals.given_back
            lab.bus.advance(31)
            await lab.until(lambda before=given_back: _true(service.vitals.given_back >= before + 2))
        assert await open_messages(lab) == 2
        assert service.vitals.state == "waiting"
        assert "the judge is away" in service.vitals.status_text
        down = False
        lab.bus.advance(31)
        await lab.until(settled(lab, 3))
        assert service.vitals.state == "ok"
    assert service.bus.delays[:6:2] == [1, 2, 4]
    assert set(service.bus.delays[6:]) == {5}
    assert not await lab.events("dead", DeadLetter)


async def test_a_dependency_is_waited_for_before_a_group_is_given_back(lab):
    tries = 0

    async def handle(_):
        nonlocal tries
        tries += 1
        if tries < 3:
            raise InfrastructureError("connection refused")

    await lab.store(lab.group(1))
    async with lab.running(a_stage(handle, patience_s=30.0)) as service:
        await lab.until(settled(lab, 1))
    assert (tries, service.bus.delays, service.vitals.given_back) == (3, [], 0)


async def test_kills_while_a_dependency_is_away_never_make_a_dead_letter(lab):
    """However often a replica is killed that waits for it: no group is to blame."""
    waiting = anyio.Event()

    async def handle(_):
        if waiting.is_set():
            await anyio.sleep_forever()
        waiting.set()
        raise InfrastructureError("down")

    for n in (1, 2):
        await lab.store(lab.group(n))
    for _ in range(6):
        waiting = anyio.Event()
        async with lab.running(a_stage(handle, max_attempts=2, concurrency=1)) as service:
            await waiting.wait()
            await lab.until(lambda s=service: _true(s.vitals.retried >= 1))
            service.kill()
        lab.bus.advance(31)
    async with lab.running(a_stage(nothing, max_attempts=2)):
        await lab.until(settled(lab, 2))
    assert not await lab.events("dead", DeadLetter)
    for seq in (1, 2):
        assert await lab.bus.value(keys.attempts(DURABLE, seq)) is None


async def test_a_full_stream_means_waiting_not_loss(lab, monkeypatch):
    full = True
    publish = lab.bus.publish

    async def bounded(*args, **kwargs):
        if full:
            raise StreamFullError("EVENTS is at its budget")
        return await publish(*args, **kwargs)

    monkeypatch.setattr(lab.bus, "publish", bounded)
    for n in range(3):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(nothing)) as service:
        await lab.until(lambda: _true(service.vitals.retried >= 3))
        assert service.vitals.state == "backpressure"
        assert await open_messages(lab) == 3
        full = False
        await lab.until(settled(lab, 3))
    assert service.vitals.emitted == 3


async def test_a_full_stream_that_stays_full_gives_everything_back_on_drain(lab, monkeypatch):
    async def full(*_, **__):
        raise StreamFullError("EVENTS is at its budget")

    monkeypatch.setattr(lab.bus, "publish", full)
    for n in range(3):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(nothing)) as service:
        await lab.until(lambda: _true(service.vitals.retried >= 1))
    monkeypatch.undo()
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 3))  # at once: nothing waits for an acknowledgement to run out


async def test_a_message_too_large_for_the_bus_is_split(lab, monkeypatch):
    async def long(rollout):
        return GroupScore(
            group=rollout.group.id, seq=rollout.seq, item="x" * (3 << 20), policy_step=0, scores=[1.0], ratings={},
            lengths=[1],
        )  # fmt: skip

    gate = anyio.Event()
    publish = lab.bus.publish

    async def slow(*args, **kwargs):
        await gate.wait()
        return await publish(*args, **kwargs)

    monkeypatch.setattr(lab.bus, "publish", slow)
    async with lab.running(a_stage(long)) as service:
        for n in range(5):
            await lab.store(lab.group(n))
        await lab.until(lambda: _true(service.vitals.handled == 5))
        gate.set()
        await lab.until(settled(lab, 5))
    assert sorted(len(event.groups) for event in await lab.events("score", ScoreEvent)) == [1, 2, 2]


async def test_a_single_annotation_too_large_for_the_bus_is_a_dead_letter(lab):
    async def huge(rollout):
        return GroupScore(
            group=rollout.group.id, seq=rollout.seq, item="x" * (9 << 20), policy_step=0, scores=[1.0], ratings={},
            lengths=[1],
        )  # fmt: skip

    await lab.store(lab.group(1))
    async with lab.running(a_stage(huge)):
        await lab.until(settled(lab, 1))
    assert len(await lab.events("dead", DeadLetter)) == 1


async def test_a_bug_ends_the_service(lab):
    async def handle(_):
        raise ZeroDivisionError("a bug")

    await lab.store(lab.group(1))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with lab.running(a_stage(handle), drain=False):
            await anyio.sleep_forever()
    assert caught.value.split(ZeroDivisionError)[1] is None


async def die_of(lab, stage, failure):
    """Run the stage until `failure` ends it."""
    with anyio.fail_after(60), pytest.raises(BaseExceptionGroup) as caught:
        async with lab.running(stage, drain=False):
            await anyio.sleep_forever()
    assert caught.value.split(failure)[1] is None


async def test_a_group_whose_handling_raises_a_bug_again_and_again_becomes_a_dead_letter(lab):
    handled = []

    async def handle(rollout):
        handled.append(rollout.seq)
        if rollout.group.item == "item-1":
            raise ZeroDivisionError("a bug")

    stage = a_stage(handle, max_attempts=3)
    await lab.store(lab.group(1))
    for _ in range(3):
        await die_of(lab, stage, ZeroDivisionError)
    assert handled == [1, 1, 1]
    await lab.store(lab.group(2))
    async with lab.running(stage):
        await lab.until(settled(lab, 2))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.kind, letter.seq, letter.attempts, letter.group) == ("poison", 1, 3, f"{1:032x}")
    assert handled == [1, 1, 1, 2]


async def test_a_group_that_kills_its_process_becomes_a_dead_letter_and_its_neighbours_do_not(lab):
    """The poison kills while its neighbours are under way, so each death takes all of them down with it."""
    lives = []

    async def found_out():
        return lives[-1].bus.dead or bool(await lab.events("dead", DeadLetter))

    async def handle(rollout):
        if rollout.group.item == "item-3":
            await anyio.sleep(0.02)  # the neighbours have begun, and will not be done
            lives[-1].kill()
        await anyio.sleep(0.25)

    stage = a_stage(handle, max_attempts=3, ack_wait_s=30.0)
    for n in range(6):
        await lab.store(lab.group(n))
    while not await lab.events("dead", DeadLetter):
        assert len(lives) < 8, "the poison is never found out"
        async with lab.running(stage) as service:
            lives.append(service)
            await lab.until(found_out)
        lab.bus.advance(31)
    async with lab.running(stage):
        await lab.until(settled(lab, 6))
    (letter,) = await lab.events("dead", DeadLetter)
    assert (letter.kind, letter.group) == ("poison", f"{3:032x}")
    assert letter.attempts == 3
    assert len(lives) == 5  # three on record, the first one that is not, and the life that buried it
    for seq in range(1, 7):  # and nothing is left to fill the bucket
        assert await lab.bus.value(keys.attempts(DURABLE, seq)) is None


async def test_orderly_returns_never_count_as_deaths(lab):
    started = anyio.Event()

    async def busy(_):
        started.set()
        raise InfrastructureError("the rater is down")

    await lab.store(lab.group(1))
    for _ in range(6):
        started = anyio.Event()
        async with lab.running(a_stage(busy, max_attempts=2)):
            await started.wait()
    async with lab.running(a_stage(nothing, max_attempts=2)):
        await lab.until(settled(lab, 1))
    assert not await lab.events("dead", DeadLetter)


async def test_an_orderly_return_does_not_wipe_out_deaths_before_it(lab):
    mode = "die"
    started = anyio.Event()

    async def handle(_):
        started.set()
        if mode == "die":
            raise ZeroDivisionError
        raise InfrastructureError("down")

    stage = a_stage(handle, max_attempts=3)
    await lab.store(lab.group(1))
    for mode in ("die", "wait", "die", "wait", "die"):
        if mode == "die":
            await die_of(lab, stage, ZeroDivisionError)
        else:
            started = anyio.Event()
            async with lab.running(stage):
                await started.wait()
    async with lab.running(stage):
        await lab.until(settled(lab, 1))
    (letter,) = await lab.events("dead", DeadLetter)
    assert letter.attempts == 3


async def test_a_drain_finishes_what_is_begun_and_gives_back_the_rest_at_once(lab):
    go_on = anyio.Event()
    begun = []

    async def handle(rollout):
        begun.append(rollout.seq)
        await go_on.wait()

    for n in range(6):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(handle, concurrency=2)) as first:
        await lab.until(lambda: _true(len(begun) == 2))
        first.drain()
        other = []

        async def quick(rollout):
            other.append(rollout.seq)

        async with lab.running(a_stage(quick)):  # while the first still works
            await lab.until(lambda: _true(len(other) == 4))
            assert not set(other) & set(begun)
            assert len(begun) == 2
            go_on.set()
            await lab.until(settled(lab, 6))
    assert first.vitals.emitted == 2
    assert first.vitals.state == "draining"


async def test_a_drain_at_any_moment_leaves_no_group_behind_and_none_handled_twice(lab):
    handled = []

    async def handle(rollout):
        handled.append(rollout.seq)
        await anyio.lowlevel.checkpoint()

    for n in range(400):
        await lab.store(lab.group(n))
    for moment in range(60):
        async with lab.running(a_stage(handle, concurrency=3)):
            for _ in range(moment):
                await anyio.lowlevel.checkpoint()
    async with lab.running(a_stage(handle)):
        await lab.until(settled(lab, 400))
    assert sorted(handled) == list(range(1, 401))


async def test_two_replicas_share_the_work(lab):
    by_replica = ([], [])

    def stage(mine):
        async def handle(rollout):
            mine.append(rollout.seq)
            await anyio.sleep(0.002)

        return a_stage(handle, concurrency=2)

    async with lab.running(stage(by_replica[0])), lab.running(stage(by_replica[1])):
        for n in range(40):
            await lab.store(lab.group(n))
        await lab.until(settled(lab, 40))
    assert sorted(itertools.chain(*by_replica)) == list(range(1, 41))
    assert all(len(mine) >= 5 for mine in by_replica)


async def test_long_work_is_kept_from_being_delivered_again(lab):
    handled = []

    async def handle(rollout):
        handled.append(rollout.seq)
        await anyio.sleep(3.5)

    await lab.store(lab.group(1))
    async with lab.running(a_stage(handle, ack_wait_s=1.5)) as service, lab.running(a_stage(handle, ack_wait_s=1.5)):
        await lab.until(settled(lab, 1))
        assert handled == [1]
        assert service.vitals.redelivered == 0


async def test_a_lost_acknowledgement_costs_a_duplicate_of_the_same_content(lab):
    await lab.store(lab.group(1))
    async with lab.running(a_stage(nothing)) as service:
        service.bus.acks = False
        await lab.until(lambda: _true(service.vitals.emitted == 1))
    lab.bus.advance(601)  # past the acknowledgement wait, and past the window that drops duplicates
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 2))
    first, second = [event.groups[0] for event in await lab.events("score", ScoreEvent)]
    assert first != second  # their stamps differ
    assert msgspec.structs.replace(first, stamps=[]) == msgspec.structs.replace(second, stamps=[])


async def test_a_killed_replicas_groups_are_handled_by_another_and_scored_once(lab):
    started = anyio.Event()

    async def hang(_):
        started.set()
        await anyio.sleep_forever()

    for n in range(4):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(hang)) as service:
        await started.wait()
        service.kill()
    lab.bus.advance(31)
    async with lab.running(a_stage(nothing)):
        await lab.until(settled(lab, 4))
    scored = [item.group for event in await lab.events("score", ScoreEvent) for item in event.groups]
    assert sorted(scored) == [f"{n:032x}" for n in range(4)]


async def test_an_annotation_that_nobody_could_read_is_never_stored(lab):
    async def infinite(rollout):
        if rollout.group.item == "item-2":
            return GroupScore(
                group=rollout.group.id, seq=rollout.seq, item="i", policy_step=0, scores=[float("inf"), 0.0],
                ratings={}, lengths=[3, 3],
            )  # fmt: skip
        return None

    for n in (1, 2, 3):
        await lab.store(lab.group(n))
    async with lab.running(a_stage(infinite)):
        await lab.until(settled(lab, 3))
    scored = [item.seq for event in await lab.events("score", ScoreEvent) for item in event.groups]
    (letter,) = await lab.events("dead", DeadLetter)
    assert (sorted(scored), letter.seq, letter.stream) == ([1, 3], 2, subjects.ROLLOUTS)


async def test_a_copy_of_a_group_is_scored_under_its_own_sequence(lab):
    """Stored again once the broker has forgotten its id: stages that wait for the copy's score must get it."""
    async with lab.running(a_stage(nothing)):
        for counter in (1, 2):
            await lab.store(lab.group(1, counter=counter))
            await lab.until(settled(lab, counter))
    assert [item.seq for event in await lab.events("score", ScoreEvent) for item in event.groups] == [1, 2]


@pytest.mark.parametrize(
    ("name", "ratio", "told"), [("scorer", 0.0, True), ("teacher", 0.0, False), ("teacher", 1.0, False)]
)
async def test_the_work_that_ended_in_a_dead_letter_is_in_the_trace_of_the_dead(lab, name, ratio, told):
    """Of a sampled rollout the stage exports it; if the letter ends the trace, what exports that gets it."""

    async def handle(rollout):
        raise DataError("no such answer")

    sink, group = Kept(), lab.group(1)
    async with lab.bus.listen(subjects.incident("r")) as incidents:
        async with lab.running(a_stage(handle), name) as service:
            service.tracing = Tracing(TelemetryConfig(ratio=ratio), sink)
            await lab.store(group)
            await lab.until(lambda: _true(service.vitals.dead == 1))
        await lab.bus.broadcast(subjects.incident("r"), b"the last")
        found = []
        while (message := await anext(incidents)).data != b"the last":
            found.append(decode(StageIncident, message.data))
    assert [(one.group, one.stamp.stage, one.error_type, one.error) for one in found] == (
        [(group.id, name, "DataError", "no such answer")] if told else []
    )
    if not ratio:
        assert sink.spans == []
        return
    waited, worked = sink.spans
    assert (waited.trace, worked.trace, worked.id) == (group.id, group.id, process_id(group.id, name, 1))
    assert (worked.error, worked.attributes["error.type"]) == ("no such answer", "DataError")
    assert worked.attributes["messaging.message.id"] == "ROLLOUTS:1"


async def _given_back(lab, group, service_name, ratio, sink):
    """Have `group` delivered twice: the first replica gives it back, and the second handles it."""
    attempts = itertools.count()

    async def handle(rollout):
        if next(attempts) == 0:
            raise InfrastructureError("the server is unavailable")

    async with lab.running(a_stage(handle, patience_s=0.0), service_name) as service:
        service.tracing = Tracing(TelemetryConfig(ratio=ratio), sink)
        await lab.store(group)
        await lab.until(lambda: _true(service.vitals.emitted == 1))


async def test_a_group_that_was_handled_again_is_announced_unless_its_spans_are_exported_anyway(lab):
    sink = Kept()
    async with lab.bus.listen(subjects.incident("r")) as messages:
        await _given_back(lab, lab.group(1), "teacher", 0.0, sink)
        assert sink.spans == []
        await _given_back(lab, lab.group(2, counter=2), "teacher", 1.0, sink)
        await lab.bus.broadcast(subjects.incident("r"), b"the last")
        event = decode(StageIncident, (await anext(messages)).data)
        assert (await anext(messages)).data == b"the last"
    assert (event.group, event.stamp.stage, event.stamp.attempt) == (lab.group(1).id, "teacher", 2)


async def test_work_that_an_outage_ended_is_in_the_trace_with_what_was_done_until_then(lab):
    """An inference server has its spans below ours, whether or not ours went well."""
    sink, attempts = Kept(), itertools.count()

    async def handle(rollout):
        with traced("prompt_logprobs teacher", "client"):
            if next(attempts) == 0:
                raise InfrastructureError("the server is unavailable")

    async with lab.running(a_stage(handle, patience_s=0.0), "teacher") as service:
        service.tracing = Tracing(TelemetryConfig(ratio=1.0), sink)
        await lab.store(lab.group(1))
        await lab.until(lambda: _true(service.vitals.emitted == 1))
    works = [span for span in sink.spans if span.name.startswith("process ")]
    assert [(span.attributes["rl.delivery.attempt"], span.error) for span in works] == [
        (1, "the server is unavailable"), (2, None),
    ]  # fmt: skip
    requests = [span for span in sink.spans if span.name.startswith("prompt_logprobs")]
    assert [span.parent for span in requests] == [span.id for span in works]
    assert [span.error is None for span in requests] == [False, True]


async def test_a_result_that_cannot_be_stored_leaves_each_span_below_one_that_is_exported(lab, monkeypatch):
    async def refuse(subject, *args, **kwargs):
        if subject.startswith("rl.score."):
            raise DataError("too large for one message")
        return await publish(subject, *args, **kwargs)

    async def handle(rollout):
        with traced("score exact"):
            pass

    publish = lab.bus.publish
    monkeypatch.setattr(lab.bus, "publish", refuse)
    sink = Kept()
    async with lab.running(a_stage(handle), "scorer") as service:
        service.tracing = Tracing(TelemetryConfig(ratio=1.0), sink)
        await lab.store(lab.group(1))
        await lab.until(lambda: _true(service.vitals.dead == 1))
    (worked,) = [span for span in sink.spans if span.name.startswith("process ")]
    (scored,) = [span for span in sink.spans if span.name.startswith("score ")]
    assert (scored.parent, worked.error) == (worked.id, "too large for one message")
