import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.ledger.reader import parts_of


@pytest.mark.parametrize(
    ("seqs", "parts"),
    [
        ([], []),
        ([5], [([5], False)]),
        ([1, 2, 3], [([1, 2, 3], False)]),
        ([1, 2, 3, 4], [([1, 2, 3, 4], True)]),
        ([1, 3, 5, 6, 7, 8, 10, 12], [([1, 3], False), ([5, 6, 7, 8], True), ([10, 12], False)]),
        ([1, 2, 9, 10, 11, 20], [([1, 2, 9, 10, 11, 20], False)]),
    ],
)
def test_what_has_no_gap_is_requested_at_once(seqs: list[int], parts: list[tuple[list[int], bool]]) -> None:
    assert parts_of(seqs) == parts


@given(st.sets(st.integers(1, 60)))
def test_the_parts_are_all_sequences_in_order(seqs: set[int]) -> None:
    parts = parts_of(sorted(seqs))
    assert [seq for part, _ in parts for seq in part] == sorted(seqs)
    assert all(part == list(range(part[0], part[-1] + 1)) for part, is_whole in parts if is_whole)
