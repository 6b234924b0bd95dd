"""Runs that share streams: whatever the order in which they read, measure and write, they promise no byte twice."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.flow.budget import Budget, Room
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.pipeline.flow.sharing import Demand, Share, reserve, share_of
from lachesis.schemas.errors import FencedError
from lachesis.schemas.retention import Reservation, Reservations
from lachesis.schemas.subjects import EVENTS, ROLLOUTS, TEACHER

FLOW = FlowConfig(event_bytes_per_group=0, event_bytes_per_sequence=0, teacher_bytes_per_token=0)
MOST = 1000
CLOSE = int(FLOW.close_at * MOST)
SECOND = 10**9


def figures(held: int) -> dict[str, StreamUsage]:
    return {stream: StreamUsage(1, 1, 1, size, MOST) for stream, size in ((ROLLOUTS, held), (EVENTS, 0), (TEACHER, 0))}


def reserved(
    old: Reservations,
    run: str,
    *,
    promised: int = 0,
    wanted: int = 0,
    held: int = 0,
    now_ns: int = 0,
    keeps: bool = False,
    term: str | None = None,
    takes_over: bool = False,
) -> Reservations:
    return reserve(
        old,
        run,
        term or f"{run}-term",
        Demand({ROLLOUTS: promised}, {ROLLOUTS: wanted} if wanted else {}),
        figures(held),
        now_ns=now_ns,
        lasts_s=10.0,
        close_at=FLOW.close_at,
        keeps=keeps,
        takes_over=takes_over,
    )


def test_a_run_alone_reserves_half_of_what_is_left_and_all_if_it_wants_it() -> None:
    record = reserved(Reservations(), "a", held=200)
    assert share_of(record, "a").own == {ROLLOUTS: 300}
    record = reserved(record, "a", promised=290, wanted=310, held=200)
    assert share_of(record, "a").own == {ROLLOUTS: 600}


def test_what_others_want_is_left_to_them() -> None:
    record = reserved(Reservations(), "a", promised=100)
    assert share_of(record, "a").own == {ROLLOUTS: 450}
    record = reserved(record, "b", wanted=600)
    assert record.runs["b"].wants == {ROLLOUTS: 600}
    record = reserved(record, "a", promised=100)
    assert share_of(record, "a").own == {ROLLOUTS: 150}
    record = reserved(record, "b", wanted=600)
    assert share_of(record, "b").own == {ROLLOUTS: 625}
    assert record.runs["b"].wants == {}


def test_what_is_promised_stays_reserved_even_if_there_is_no_room_for_it() -> None:
    record = reserved(Reservations(), "a", promised=500)
    record = reserved(record, "b", promised=700, wanted=10)
    assert share_of(record, "b").own == {ROLLOUTS: 700}


def test_small_changes_are_not_written() -> None:
    record = reserved(Reservations(), "a", held=200)
    assert reserved(record, "a", held=210, promised=20, now_ns=SECOND) is record
    assert reserved(record, "a", held=210, promised=20, now_ns=3 * SECOND) is not record  # it is to be renewed
    assert reserved(record, "a", held=700, now_ns=SECOND) is not record


def test_a_reservation_lapses_when_it_was_not_renewed_and_not_before() -> None:
    record = reserved(Reservations(), "dead", promised=CLOSE)
    assert share_of(reserved(record, "b", now_ns=10 * SECOND - 1), "b").own == {ROLLOUTS: 0}
    record = reserved(record, "b", now_ns=10 * SECOND)
    assert share_of(record, "b").own == {ROLLOUTS: CLOSE // 2}
    assert record.runs.keys() == {"b"}


def test_a_later_governor_takes_a_reservation_over_and_gives_nothing_back_before_it_knows() -> None:
    record = reserved(Reservations(), "a", promised=600)
    record = reserved(record, "a", keeps=True, term="later", takes_over=True)
    assert record.runs["a"].bytes[ROLLOUTS] >= 600
    with pytest.raises(FencedError, match="later has taken over"):
        reserved(record, "a", promised=600)


def test_a_budget_promises_no_more_than_its_share_and_says_who_has_the_rest() -> None:
    budget = Budget(FLOW)
    record = Reservations(runs={"b": Reservation(term="t", expires_ns=SECOND, bytes={ROLLOUTS: 600})})
    record = reserved(record, "a")
    budget.read(0.0, figures(0), share_of(record, "a"))
    assert budget.refusal(Room(rollouts=100)) is None
    assert "being reserved" in str(budget.refusal(Room(rollouts=150)))
    assert budget.lacks
    assert budget.demand().wanted == {ROLLOUTS: 150}
    refusal = str(budget.refusal(Room(rollouts=201)))
    assert "holds 0 bytes and 801 more are promised, 600 of them to run b, of 80% of 1,000" in refusal
    assert budget.demand().wanted == {ROLLOUTS: 201}


def test_while_a_record_is_being_written_neither_the_old_nor_the_new_share_is_exceeded() -> None:
    budget = Budget(FLOW)
    for before, after in ((400, 100), (100, 400)):
        budget.read(0.0, figures(0), Share({ROLLOUTS: before}, {}))
        budget.narrow(Share({ROLLOUTS: after}, {}))
        assert budget.refusal(Room(rollouts=100)) is None
        assert budget.refusal(Room(rollouts=101)) is not None


@dataclass
class Run:
    """A governor: what it has promised by group; `reading` and `writing` are where it is in agreeing on its share."""

    name: str
    budget: Budget = field(default_factory=lambda: Budget(FLOW))
    promises: list[int] = field(default_factory=list)
    reading: tuple[int, Reservations] | None = None
    writing: tuple[int, Reservations, float, dict[str, StreamUsage]] | None = None
    dead_ns: int | None = None


class Shared(RuleBasedStateMachine):
    """Two runs on one stream. Each step of each of them may come between any two of another.

    A dead run's groups are stored until its reservation has lapsed, never after.
    """

    def __init__(self) -> None:
        super().__init__()
        self.runs = [Run(name) for name in "ab"]
        self.record, self.revision = Reservations(), 0
        self.held = 0
        self.now_ns = 1
        self.step = 0.0

    number = st.integers(0, 1)

    def of(self, number: int) -> Run:
        return self.runs[number]

    @rule(number=number)
    def read(self, number: int) -> None:
        self.of(number).reading = (self.revision, self.record)

    @rule(number=number)
    def measure(self, number: int) -> None:
        run = self.of(number)
        if run.reading is None or run.dead_ns is not None:
            return
        revision, old = run.reading
        self.step += 1
        usage = figures(self.held)
        new = reserve(
            old,
            run.name,
            "t",
            run.budget.demand(),
            usage,
            now_ns=self.now_ns,
            lasts_s=10.0,
            close_at=FLOW.close_at,
            keeps=False,
            takes_over=False,
        )
        run.reading = None
        if new is old:
            run.budget.read(self.step, usage, share_of(new, run.name))
        else:
            run.budget.narrow(share_of(new, run.name))
            run.writing = (revision, new, self.step, usage)

    @rule(number=number, is_lost=st.booleans())
    def write(self, number: int, is_lost: bool) -> None:
        run = self.of(number)
        if run.writing is None or run.dead_ns is not None:
            return
        revision, new, asked, usage = run.writing
        run.writing = None
        if revision == self.revision:
            self.record, self.revision = new, self.revision + 1
            if not is_lost:  # the answer
                run.budget.read(asked, usage, share_of(new, run.name))

    @rule(number=number)
    def agree(self, number: int) -> None:
        self.read(number)
        self.measure(number)
        self.write(number, is_lost=False)

    @rule(number=number, size=st.sampled_from([10, 100, 300, 800]), most=st.sampled_from([1, 100]))
    def promise(self, number: int, size: int, most: int) -> None:
        """Grant what is asked for; what was refused is asked for again once it is told of, or at once."""
        run, room = self.of(number), Room(rollouts=size)
        for is_last in (False, True):
            if run.budget._share is None or is_last:
                self.agree(number)
            while most and run.dead_ns is None and run.budget.refusal(room) is None:
                run.budget.promise(room)
                run.promises.append(size)
                most -= 1

    @rule(number=number, size=st.sampled_from([10, 100, 300, 800]))
    def ask(self, number: int, size: int) -> None:
        """The same, for what fits as yet."""
        run, room = self.of(number), Room(rollouts=size)
        if run.budget._share is not None and run.dead_ns is None and run.budget.refusal(room) is None:
            run.budget.promise(room)
            run.promises.append(size)

    @precondition(lambda self: any(run.promises for run in self.runs))
    @rule(data=st.data(), is_stored=st.booleans())
    def end(self, data: st.DataObject, is_stored: bool) -> None:
        """What was promised is stored, or given back."""
        run = data.draw(st.sampled_from([run for run in self.runs if run.promises]))
        size = run.promises.pop()
        if run.dead_ns is None:
            run.budget.release(Room(rollouts=size))
            if is_stored:
                self.step += 1
                run.budget.landed(self.step, size)  # until the next figures
        self.held += size if is_stored else 0

    @rule(size=st.integers(1, MOST))
    def trim(self, size: int) -> None:
        self.held = max(0, self.held - size)

    @precondition(lambda self: self.step > 8)
    @rule(number=number)
    def kill(self, number: int) -> None:
        run = self.of(number)
        run.dead_ns = run.dead_ns or self.now_ns

    @rule()
    def wait(self) -> None:
        """A dead run's leases run out; live ones renew."""
        self.now_ns += 4 * SECOND
        for number, run in enumerate(self.runs):
            if run.dead_ns is None:
                self.agree(number)
            elif self.now_ns - run.dead_ns > 10 * SECOND:
                run.promises.clear()

    @invariant()
    def bounded(self) -> None:
        promised = sum(sum(run.promises) for run in self.runs)
        assert self.held + promised <= CLOSE


TestShared = Shared.TestCase
TestShared.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
