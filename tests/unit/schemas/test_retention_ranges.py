"""Which gone messages the retention record explains, and that what it lists of deleted chunks is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.schemas import retention
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.retention import LostRange, Retention
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, TEACHER

RANGES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 6)).map(lambda one: LostRange(one[0], sum(one))))


@given(lost=RANGES, orphans=st.lists(st.integers(1, 40)), below=st.integers(1, 20), span=st.integers(0, 40))
def test_unexplained_is_what_neither_trim_nor_loss_nor_sweep_names(lost, orphans, below, span):
    record = Retention(run="r", trimmed={ROLLOUTS: below}, lost={ROLLOUTS: lost}).with_orphans(ROLLOUTS, orphans)
    known = {*orphans, *(seq for one in lost for seq in range(one.first, one.last + 1))}
    found = [seq for first, last in record.unexplained(ROLLOUTS, 5, 5 + span) for seq in range(first, last + 1)]
    assert found == [seq for seq in range(max(5, below), 6 + span) if seq not in known]


def test_chunks_are_listed_in_ranges_above_what_is_trimmed():
    record = Retention(run="r", trimmed={ROLLOUTS: 5}).with_orphans(ROLLOUTS, [9, 2, 3, 7])
    assert record.with_orphans(ROLLOUTS, [8, 12]).orphans == {ROLLOUTS: [LostRange(7, 9), LostRange(12, 12)]}


def test_very_many_are_not_listed_and_the_stream_is_looked_at_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retention, "_MAX_ORPHAN_RANGES", 3)
    record = Retention(run="r").with_orphans(ROLLOUTS, [1, 3, 5])
    assert record.swept == []
    record = record.with_orphans(ROLLOUTS, [7])
    assert (record.swept, record.orphans) == ([ROLLOUTS], {ROLLOUTS: []})


@pytest.mark.parametrize("forged", [{"swept": [EVENTS]}, {"orphans": {LEDGER: [LostRange(1, 9)]}}])
def test_chunks_are_only_where_large_messages_are(forged):
    with pytest.raises(SchemaError, match="is no stream with chunks"):
        Retention(run="r", **forged).check()
    Retention(run="r", swept=[ROLLOUTS], orphans={TEACHER: [LostRange(1, 9)]}).check()
