"""Groups that wait for others: exact subsets, in order, bounded, each client's by itself."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.extensions.atropos.gateway.logic.buffer import Buffer, PartialGroup, summing_to


@given(st.lists(st.integers(1, 9), max_size=9), st.integers(1, 16))
def test_a_subset_is_found_exactly_when_there_is_one(sizes, target):
    exists = any(sum(some) == target for n in range(len(sizes) + 1) for some in combinations(sizes, n))
    found = summing_to(sizes, target)
    assert bool(found) == exists
    assert found == sorted(set(found))
    assert not found or sum(sizes[i] for i in found) == target


def test_early_ones_go_first():
    assert summing_to([2, 2, 4], 4) == [0, 1]
    assert summing_to([3, 4, 1], 4) == [1]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 7)), max_size=40), st.integers(2, 8))
def test_nothing_is_lost_and_what_leaves_makes_up_the_size(arrivals, size):
    buffer, left = Buffer(), []
    for n, (owner, sequences) in enumerate(arrivals):
        buffer = buffer.plus(PartialGroup(owner=owner, digest=str(n), sequences=sequences, data=b"x"))
        chosen = buffer.complete(owner, size)
        assert sum(partial.sequences for partial in chosen) in (0, size)
        assert all(partial.owner == owner for partial in chosen)
        left += chosen
        buffer = buffer.minus(chosen)
        assert not buffer.complete(owner, size)
    assert sorted(int(p.digest) for p in [*left, *buffer.waiting]) == list(range(len(arrivals)))


def test_it_is_bounded_in_bytes():
    buffer = Buffer().plus(PartialGroup(owner=0, digest="a", sequences=1, data=b"x" * 60))
    assert buffer.has_room(40, 100)
    assert not buffer.has_room(41, 100)


def test_what_was_chosen_before_a_crash_is_chosen_again():
    parts = [PartialGroup(owner=0, digest=str(n), sequences=2, data=b"", leaving=n in (1, 2)) for n in range(3)]
    assert [partial.digest for partial in Buffer(waiting=parts).complete(0, 4)] == ["1", "2"]
