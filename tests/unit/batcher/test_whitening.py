"""Whitening: moments by token, groups that have no part in it, the same bits in any order."""

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.batcher.whitening import whiten, whiten_batch
from lachesis.pipeline.normalizer.estimators.loader import builtin_estimator
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef

FLOOR = 1e-3
PAIRS = st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 50)), min_size=2, max_size=20)


def ref(seq, *advantages):
    return GroupRef(
        group=f"{seq:032x}",
        seq=seq,
        env="e",
        sequences=len(advantages),
        tokens=10,
        policy_step=0,
        advantages=list(advantages),
    )


@given(PAIRS)
def test_whitening_weighs_by_tokens(pairs):
    advantages, tokens = [a for a, _ in pairs], [t for _, t in pairs]
    by_token = [w for w, t in zip(whiten(advantages, tokens), tokens, strict=True) for _ in range(t)]
    assert statistics.fmean(by_token) == pytest.approx(0, abs=1e-6)
    if max(advantages) - min(advantages) > 0.1:
        assert statistics.pstdev(by_token) == pytest.approx(1, abs=1e-6)


def test_a_sample_without_tokens_is_moved_but_moves_nobody():
    with_it = whiten([1.0, -1.0, 50.0], [3, 3, 0])
    assert with_it[:2] == whiten([1.0, -1.0], [3, 3]) == [1.0, -1.0]
    assert with_it[2] == 50.0


def test_whitening_refuses_what_has_no_tokens():
    assert {name for name in ESTIMATORS if builtin_estimator(name).whitens} == {"reinforce++-baseline", "gdpo"}
    for tokens in ([0], [-1], [1, 2], []):
        with pytest.raises(DataError, match="whitening"):
            whiten([1.0], tokens)


def test_a_batch_is_whitened_over_all_its_groups_and_what_is_missing_stays_so():
    groups = [ref(4, 1.0, -1.0), ref(7, 3.0, None, -3.0), ref(9, 0.25, -0.25)]
    lengths = {4: [1, 2], 7: [4, 99, 1]}
    done = whiten_batch(groups, lengths, FLOOR)
    first, second = done[0].advantages, done[1].advantages
    assert [*first, second[0], second[2]] == whiten([1.0, -1.0, 3.0, -3.0], [1, 2, 4, 1])
    assert second[1] is None
    assert done[2] == groups[2], "one whose reward does not ask for it has no part"
    assert groups[0].advantages == [1.0, -1.0], "the joiner's own stay as they are"


@given(PAIRS, st.randoms(use_true_random=False))
def test_the_bits_do_not_depend_on_the_order_of_the_groups(pairs, rng):
    groups = [ref(i + 1, a, -a / 3, None) for i, (a, _) in enumerate(pairs)]
    lengths = {i + 1: [t, 2 * t + 1, 5] for i, (_, t) in enumerate(pairs)}
    expected = {group.seq: group for group in whiten_batch(groups, lengths, FLOOR)}
    rng.shuffle(groups)
    assert {group.seq: group for group in whiten_batch(groups, lengths, FLOOR)} == expected


def test_a_batch_without_a_token_to_train_is_left_alone():
    groups = [ref(1, 1.0, -1.0), ref(2, None, None)]
    assert whiten_batch(groups, {1: [0, 0], 2: [5, 5]}, FLOOR) == groups
    assert whiten_batch(groups, {}, FLOOR) == groups
    assert whiten_batch([], {}, FLOOR) == []


def test_the_smallest_divisor_holds_for_a_batch_that_hardly_differs():
    [done] = whiten_batch([ref(1, 1e-9, -1e-9)], {1: [1, 1]}, FLOOR)
    assert done.advantages == pytest.approx([1e-6, -1e-6])


def test_the_largest_advantages_that_may_come_whiten_to_numbers():
    rng = random.Random(0)
    values = [rng.choice([-1e100, 1e100, 0.0]) for _ in range(64)]
    assert all(map(math.isfinite, whiten(values, [1 << 40] * 64)))


def test_a_token_count_too_few_names_the_group():
    with pytest.raises(DataError, match=f"{1:032x}: 1 token counts for 2"):
        whiten_batch([ref(1, 1.0, -1.0)], {1: [3]}, FLOOR)
