"""Groups that pass from one process to another: its start counts, and the one before hands out nothing more."""

from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest
from fuzz.examples import GROUP
from unit.calls.test_recorded import call, fold, start

from lachesis.pipeline.calls.left_group_request import Reservation
from lachesis.pipeline.calls.open_groups import RESERVATION_S, OpenGroups
from lachesis.pipeline.calls.recorder import CallRecorder
from lachesis.pipeline.environment.config import EnvironmentConfig
from lachesis.pipeline.environment.epoch import Claimer
from lachesis.pipeline.environment.left_groups import GroupTask, LeftGroups
from lachesis.pipeline.errors import GroupTakenError
from lachesis.pipeline.governor.left_behind import LeftBehind
from lachesis.schemas.calls import CallKey, TakeUpRequest
from lachesis.schemas.subjects import CALLS


async def test_a_process_that_has_lost_its_group_hands_out_no_answer_and_does_not_end_the_group(lab) -> None:
    """It is stopped while the broker stores an answer, which no other process knows, and goes on after its lease."""
    held = AsyncMock(return_value=True)
    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        recorder = CallRecorder(service, start().replace(lease="a"), is_held=held)
        await recorder.begin()
        await recorder.store(call(0, None))
        publish, stored = service.bus.publish, []

        async def stopped(*args, **kwargs):
            stored.append(await publish(*args, **kwargs))
            held.return_value = False
            return stored[-1]

        service.bus.publish = stopped
        with pytest.raises(GroupTakenError, match="its lease has ended"):
            await recorder.store(call(1, 0))
        assert list(recorder.known.sessions["0.0"].calls) == [0]
        held.return_value = True  # one that it gets again is for another group
        with pytest.raises(GroupTakenError):
            await recorder.store(call(1, 0))
        await recorder.end("abandoned", reason="lost")
        assert len(stored) == 1
    assert recorder.group == GROUP
    held.assert_awaited_with("a")


async def test_a_process_that_begins_too_late_with_what_it_was_promised_gives_it_up(lab, monkeypatch) -> None:
    """It is stopped before its start is stored: another one was given the group meanwhile."""
    monkeypatch.setattr("lachesis.pipeline.calls.left_group_request.boottime_s", lambda: 100.0)
    reservation = Reservation.from_now()
    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        known = fold(start(), call(0, None))
        held = AsyncMock(return_value=True)
        await CallRecorder(service, start(life=2), known, is_held=held, reservation=reservation).begin()
        monkeypatch.setattr("lachesis.pipeline.calls.left_group_request.boottime_s", lambda: 100.0 + RESERVATION_S)
        late = CallRecorder(service, start(life=2), known, is_held=held, reservation=reservation)
        with pytest.raises(GroupTakenError):
            await late.begin()
        with pytest.raises(GroupTakenError):
            await late.store(call(1, 0))


async def test_a_process_that_has_lost_its_group_does_not_abandon_it(lab) -> None:
    """The one that goes on with it would lose it when it is killed."""
    held = AsyncMock(return_value=True)
    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        recorder = CallRecorder(service, start().replace(lease="a"), is_held=held)
        await recorder.begin()
        held.return_value = False
        await recorder.end("abandoned", reason="its code failed")
        assert (await lab.bus.usage(CALLS)).messages == 1


async def test_a_group_is_given_with_all_that_was_stored_while_its_lease_was_held(lab) -> None:
    """The governor has not read the last answer yet, which an agent has, when the lease ends."""
    async with lab.running(lambda service: service.draining.wait(), "governor") as service:
        left = LeftBehind(service, SimpleNamespace(is_leased=lambda env, lease: False))
        recorder = CallRecorder(service, start(), is_held=AsyncMock(return_value=True))
        await recorder.begin()
        await left.catch_up()
        await recorder.store(call(0, None))
        reply = await left.answer("e", TakeUpRequest(env="e", holder="q", life=9), 0.0)
        assert [record.kind for record in reply.records] == ["start", "call"]


async def test_a_process_that_runs_for_longer_takes_a_group_up_from_a_newer_one(lab) -> None:
    """Lives are the times at which processes started. Its start counts all the same, and so do its records."""
    async with lab.running(lambda service: service.draining.wait(), "environment") as service:
        left = LeftGroups(
            service,
            "e",
            range(9),  # type: ignore[arg-type]  # only its length is read
            EnvironmentConfig(kind="agent"),
            Claimer("older", 1),
            held_out=np.empty(0, np.int64),
            task=lambda index: None,  # type: ignore[arg-type, return-value]  # no task is made here
            is_held=AsyncMock(return_value=True),
        )
        newer = start(life=2)
        recorded = fold(newer, call(0, None, life=2))
        recorder = left.recorder(GroupTask(7, "s", 1.0, recorded=recorded), "b", newer)
    taken_up = recorder.known.start
    assert (taken_up.holder, taken_up.lease, taken_up.known_seq) == ("older", "b", 2)
    group = fold(newer, call(0, None, life=2), taken_up, call(1, 0, life=recorder.life))
    assert list(group.sessions["0.0"].calls) == [0, 1]
    assert group.start == taken_up
    under_way = OpenGroups(lambda env, lease: lease == "b")
    for seq, one in enumerate((newer, taken_up), 1):
        under_way.apply(seq, "e", CallKey("start", GROUP, one.holder, one.life, one.lease), seq)
    assert under_way.count_free("e", 0.0) == 0, "it works on the group, under its own lease"
