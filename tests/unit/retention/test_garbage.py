"""What goes when somebody asks: over any history, readers and limits, nothing that anybody needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.retention.garbage import (
    SUBJECT_WRITER,
    GcDecider,
    GcDecision,
    StoredHeader,
    StoredRevision,
    old_revisions,
)
from lachesis.pipeline.retention.retention_floor import RetentionClaim, hold_claims
from lachesis.schemas.retention import Hold
from lachesis.schemas.subjects import EVENTS, ROLLOUTS

SUBJECTS = ("rl.rollout.r.a", "rl.rollout.r.b", "rl.rollout.r.c")


@st.composite
def histories(draw: st.DrawFn) -> list[StoredHeader]:
    seq, time_ns, found = 0, 0, []
    for _ in range(draw(st.integers(0, 30))):
        seq, time_ns = seq + draw(st.integers(1, 3)), time_ns + draw(st.integers(0, 5))
        found.append(StoredHeader(seq, draw(st.sampled_from(SUBJECTS)), time_ns, draw(st.integers(1, 9))))
    return found


claims = st.lists(
    st.builds(
        RetentionClaim,
        stream=st.sampled_from([ROLLOUTS, ROLLOUTS, EVENTS]),
        subject=st.sampled_from([*SUBJECTS, ">"]),
        needs=st.integers(0, 100),
        holder=st.sampled_from(["scorer", "trainer", "hold"]),
    ),
    max_size=6,
)
ages = st.none() | st.integers(0, 120)


def decided(headers: list[StoredHeader], claimed: list[RetentionClaim], **limits: int | None) -> GcDecision:
    lasts = {header.subject: header.seq for header in headers}
    decider = GcDecider(ROLLOUTS, claimed, lasts, **limits)
    for header in headers:
        if not decider.decide_message(header):
            break
    return decider.decision


def trimmed(headers: list[StoredHeader], decision: GcDecision) -> list[StoredHeader]:
    """What the broker deletes: all below a sequence on a subject, but its last message."""
    lasts = {header.subject: header.seq for header in headers}
    return [h for h in headers if h.seq < decision.before.get(h.subject, 0) and h.seq != lasts[h.subject]]


@pytest.mark.slow
@given(headers=histories(), claimed=claims, born=ages, excess=st.integers(0, 200), kept=ages)
def test_nothing_goes_that_anybody_needs_and_what_goes_is_what_was_said(
    headers: list[StoredHeader], claimed: list[RetentionClaim], born: int | None, excess: int, kept: int | None
) -> None:
    decision = decided(headers, claimed, born_before_ns=born, excess=excess, kept_from_ns=kept)
    gone = trimmed(headers, decision)
    for header in gone:
        needed = [c for c in claimed if c.stream == ROLLOUTS and c.subject in (header.subject, ">")]
        assert all(header.seq < claim.needs for claim in needed), "somebody needs it"
        assert kept is None or header.time_ns < kept
    assert (len(gone), sum(h.size for h in gone)) == (decision.messages, decision.bytes)
    lasts = {header.subject: header.seq for header in headers}
    assert not {h.seq for h in gone} & set(lasts.values())
    held = sum(one.messages for one in decision.held.values())
    assert held <= len(headers) - len(gone)


@pytest.mark.slow
@given(headers=histories(), claimed=claims, born=st.integers(0, 120))
def test_by_age_all_goes_that_is_older_and_nobody_needs(
    headers: list[StoredHeader], claimed: list[RetentionClaim], born: int
) -> None:
    gone = trimmed(headers, decided(headers, claimed, born_before_ns=born, excess=0))
    lasts = {header.subject: header.seq for header in headers}
    for header in headers:
        needed = any(
            c.needs <= header.seq for c in claimed if c.stream == ROLLOUTS and c.subject in (header.subject, ">")
        )
        free = not needed and header.seq != lasts[header.subject]
        assert (header in gone) is (header.time_ns < born and free)


@given(headers=histories(), excess=st.integers(0, 200))
def test_by_size_the_oldest_go_and_no_more_than_needed(headers: list[StoredHeader], excess: int) -> None:
    decision = decided(headers, [], born_before_ns=None, excess=excess)
    gone = trimmed(headers, decision)
    lasts = {header.subject: header.seq for header in headers}
    free = [header for header in headers if header.seq != lasts[header.subject]]
    assert gone == free[: len(gone)]
    assert decision.bytes >= excess or gone == free
    assert not gone or decision.bytes - gone[-1].size < excess


def test_who_keeps_it_is_said() -> None:
    headers = [StoredHeader(seq, SUBJECTS[0], seq, 10) for seq in range(1, 6)]
    holds = {"export": Hold(needs={ROLLOUTS: 4}, expires_ns=9, about="of live")}
    decision = decided(headers, hold_claims(holds), born_before_ns=9, excess=0)
    assert (decision.before, decision.messages) == ({SUBJECTS[0]: 4}, 3)
    (holder,) = decision.held
    assert (holder, decision.held[holder].messages, decision.held[holder].first) == ("export (of live)", 2, 4)
    assert list(decided(headers, [], born_before_ns=9, excess=0).held) == [SUBJECT_WRITER]


def test_revisions_go_whole_the_oldest_first_and_never_one_that_is_written() -> None:
    old, busy, new = (
        StoredRevision("old", 1, 10, 1, None),
        StoredRevision("busy", 1, 10, 2, "replay"),
        StoredRevision("new", 1, 10, 3, None),
    )

    def going(*named: str, born: int | None = None, excess: int = 0) -> list[str]:
        return [one.name for one in old_revisions([new, busy, old], named, born_before_ns=born, excess=excess)]

    assert going() == []
    assert going("new", "busy") == ["new"]
    assert going(born=3) == ["old"]
    assert (going(excess=5), going(excess=11)) == (["old"], ["old", "new"])
