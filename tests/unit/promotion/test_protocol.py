"""The protocol as a state machine: writers that die anywhere, scorers that look late, and never two who judge one."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lachesis.pipeline.promotion.logic import (
    active_promotion,
    decide,
    giving_up_promotion,
    publish_decision,
    request,
    undecided_promotion,
)
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.promotion import Promotion, PromotionOutcome, Promotions


def asked(revision: str, at: int = 1, first: int | None = None, *, give_up: bool = False) -> Promotion:
    return Promotion(
        revision=revision,
        digest=f"of {revision}",
        by="me",
        asked_ns=at,
        environments={},
        std_floor=1e-3,
        first=first,
        give_up=give_up,
    )


class Promoting(RuleBasedStateMachine):
    """The log: rollouts and lists of promotions in ROLLOUTS, the ledger's newest. Any actor may stop between two steps,
    which is to say that it holds what it read while the others go on."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[list[Promotion] | None] = [None]  # None: a rollout
        self.ledger: list[PromotionOutcome] = []
        self.operators: list[tuple[int, Promotions]] = []
        self.batcher: tuple[int, list[Promotion], int] | None = None
        self.judged: dict[int, str | None] = {}
        self.time = 0

    def listed(self, last: int) -> tuple[int, list[Promotion]]:
        """The newest list, and where it is stored, on a server that has the log up to `last`."""
        return next(((seq, self.log[seq - 1]) for seq in range(last, 0, -1) if self.log[seq - 1] is not None), (0, []))

    @property
    def known(self) -> list[Promotion]:
        return self.listed(len(self.log))[1]

    def write(self, expected: int, promotions: Promotions) -> None:
        if expected == self.listed(len(self.log))[0]:  # the fence
            promotions.check()
            self.log.append(promotions.promotions)

    @rule()
    def produce(self) -> None:
        self.log.append(None)

    @rule(revision=st.sampled_from("abc"), give_up=st.booleans())
    def operator_reads(self, revision: str, give_up: bool) -> None:
        self.time += 1
        try:
            wanted = request("r", self.known, asked(revision, self.time, give_up=give_up))
        except ConfigError:
            assert undecided_promotion(self.known) is not None
        else:
            if wanted is not None:
                self.operators.append((self.listed(len(self.log))[0], wanted))

    @precondition(lambda self: self.operators)
    @rule(which=st.integers(0, 9))
    def operator_writes(self, which: int) -> None:
        self.write(*self.operators.pop(which % len(self.operators)))

    @rule()
    def batcher_reads(self) -> None:
        """A batcher, or its next life: what the one before held is gone."""
        self.batcher = (*self.listed(len(self.log)), len(self.ledger))

    @precondition(lambda self: self.batcher)
    @rule()
    def batcher_decides(self) -> None:
        version, known, entries = self.batcher
        if entries != len(self.ledger):
            return  # fenced: the ledger went on
        decided = decide(known, self.ledger[-1] if self.ledger else None, version)
        if decided is not None:
            self.ledger.append(decided)
            self.batcher = (version, known, len(self.ledger))

    @precondition(lambda self: self.batcher)
    @rule()
    def batcher_tells(self) -> None:
        version, known, entries = self.batcher
        told = publish_decision("r", known, self.ledger[entries - 1] if entries else None)
        if told is not None:
            self.write(version, told)

    @rule(which=st.integers(0, 99), lag=st.integers(0, 9), score=st.booleans())
    def scorer_looks(self, which: int, lag: int, score: bool) -> None:
        """It looks at the list as a server has it that has the rollout, and maybe nothing behind it; then it dies, or
        scores, at once or much later."""
        rollouts = [seq for seq, stored in enumerate(self.log, 1) if stored is None]
        seq = rollouts[which % len(rollouts)]
        _, known = self.listed(max(seq, len(self.log) - lag))
        if undecided_promotion(known) is not None:
            return  # it waits
        one = active_promotion(known, seq)
        judge = one.revision if one else None
        if score:
            assert self.judged.setdefault(seq, judge) == judge, "one rollout, two who judge it"

    @invariant()
    def the_ledger_decides(self) -> None:
        firsts = [entry.first for entry in self.ledger]
        assert firsts == sorted(set(firsts))
        for seq, judge in self.judged.items():
            said = [entry.revision for entry in self.ledger if entry.first <= seq]
            assert judge == (said[-1] if said else None)

    @invariant()
    def the_list_follows(self) -> None:
        told = [(one.revision, one.first) for one in self.known if one.first is not None]
        assert told == [(entry.revision, entry.first) for entry in self.ledger][: len(told)]
        assert len(self.ledger) - len(told) <= 1


TestPromoting = Promoting.TestCase
TestPromoting.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_the_same_one_is_asked_for_once_and_two_never_at_a_time():
    first = request("r", [], asked("a"))
    assert request("r", first.promotions, asked("a", at=2)) is None
    with pytest.raises(ConfigError, match="'a' is being promoted, as me requested"):
        request("r", first.promotions, asked("b"))
    decided = [asked("a", first=5)]
    assert request("r", decided, asked("a", at=2)) is None
    assert [one.revision for one in request("r", decided, asked("b")).promotions] == ["a", "b"]


def test_a_list_out_of_order_is_refused():
    for promotions in ([asked("a"), asked("b")], [asked("a", first=5), asked("b", first=5)]):
        with pytest.raises(SchemaError):
            Promotions(run="r", promotions=promotions).check()


def test_who_judges():
    known = [asked("a", first=5), asked("b", first=9), asked("c")]
    found = [active_promotion(known, seq) for seq in (4, 5, 8, 9, 99)]
    assert [one and one.revision for one in found] == [None, "a", "a", "b", "b"]
    assert msgspec.structs.replace(known[0], first=None) == asked("a")


def test_what_nobody_can_judge_is_given_up_below_a_promotion_that_says_so():
    (known,) = request("r", [asked("a", first=5)], asked("a", at=2, give_up=True)).promotions
    assert known == asked("a", first=5, give_up=True)
    assert request("r", [known], asked("a", at=3)) is None, "it is never taken back"
    later = [asked("0", first=3), known, asked("b", first=9)]
    assert [one and one.revision for one in (giving_up_promotion(later, seq) for seq in (1, 4, 5, 9))] == [
        "a",
        "a",
        None,
        None,
    ]
    assert giving_up_promotion([asked("a", give_up=True)], 1) is None, "not decided"
