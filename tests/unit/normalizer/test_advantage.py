"""Advantages: each estimator by hand, its behaviour under shift, scale and permutation, ties, noise and bad input."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.schemas.errors import ConfigError, DataError

# gdpo is in test_gdpo.py
ALL = ["centred", "grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce++-baseline", "pass@k"]
SHIFT_FREE = [name for name in ALL if name != "maxrl"]


def compute(rewards, estimator="centred", lengths=None):
    lengths = [3] * len(rewards) if lengths is None else lengths
    return group_advantage(rewards, AdvantageConfig(estimator=estimator), lengths)


BY_HAND = {
    "centred": [-1.0, 0.0, 1.0],
    "dr_grpo": [-1.0, 0.0, 1.0],
    "reinforce++-baseline": [-1.0, 0.0, 1.0],
    "grpo": [-1.0, 0.0, 1.0],
    "rloo": [-1.5, 0.0, 1.5],
    "maxrl": [-0.5, 0.0, 0.5],
    "pass@k": [0.0, 0.0, 1.0],
    "opo": [1 - 2.25, 2 - 2.25, 3 - 2.25],
}


@pytest.mark.parametrize("estimator", ALL)
def test_by_hand(estimator):
    result = compute([1.0, 2.0, 3.0], estimator, lengths=[1, 1, 2])
    assert result.advantages == pytest.approx(BY_HAND[estimator])
    assert (result.mean, result.std, result.range, result.n_valid) == (2.0, 1.0, 2.0, 3)
    assert result.verdict == "trainable"


@pytest.mark.parametrize("estimator", ALL)
def test_unscorable_samples_do_not_bias_the_others(estimator):
    lengths = [1, 9, 1, 2]
    with_gap = compute([1.0, None, 2.0, 3.0], estimator, lengths)
    assert with_gap.advantages[1] is None
    without = compute([1.0, 2.0, 3.0], estimator, [1, 1, 2])
    assert [with_gap.advantages[i] for i in (0, 2, 3)] == list(without.advantages)
    assert with_gap.mean == without.mean
    assert with_gap.n_valid == 3


rewards = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=16)


def spread(values):
    return max(values) - min(values)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", SHIFT_FREE)
@given(values=rewards, shift=st.floats(-1000, 1000))
def test_shift_changes_nothing(estimator, values, shift):
    top = sorted(values)[-2:]
    assume(spread(values) > 0.01)
    assume(estimator != "pass@k" or top[1] - top[0] > 0.01)
    moved = compute([x + shift for x in values], estimator)
    assert moved.advantages == pytest.approx(compute(values, estimator).advantages, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ALL)
@given(values=rewards, scale=st.floats(0.5, 100))
def test_scale(estimator, values, scale):
    top = sorted(values)[-2:]
    assume(spread(values) > 0.1)
    assume(estimator != "pass@k" or top[1] - top[0] > 0.1)
    if estimator == "maxrl":
        values = [abs(x) for x in values]
        assume(spread(values) > 0.1)
    factor = 1.0 if estimator in ("grpo", "maxrl", "pass@k") else scale
    expected = [factor * a for a in compute(values, estimator).advantages]
    assert compute([scale * x for x in values], estimator).advantages == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ALL)
@given(values=rewards, data=st.data())
def test_permutation_permutes_to_the_bit(estimator, values, data):
    values = [abs(x) for x in values]
    order = data.draw(st.permutations(range(len(values))))
    lengths = [i + 1 for i in range(len(values))]
    base = compute(values, estimator, lengths)
    permuted = compute([values[i] for i in order], estimator, [lengths[i] for i in order])
    assert list(permuted.advantages) == [base.advantages[i] for i in order]
    assert permuted.verdict == base.verdict


@pytest.mark.parametrize("estimator", ["centred", "grpo", "dr_grpo", "rloo", "maxrl"])
@given(values=rewards)
def test_advantages_of_a_group_sum_to_zero(estimator, values):
    total = math.fsum(compute([abs(x) for x in values], estimator).advantages)
    assert total == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ALL)
@given(values=st.lists(st.floats(0, 1e15), min_size=1, max_size=12))
def test_every_bound_holds_on_any_input(estimator, values):
    result = compute(values, estimator)
    n = len(values)
    bound = {"grpo": (n - 1) / math.sqrt(n), "maxrl": n - 1.0, "pass@k": math.sqrt(n)}.get(estimator, spread(values))
    assert all(abs(a) <= bound * (1 + 1e-9) for a in result.advantages)


def test_the_group_bounds_are_reached_by_one_outlier():
    result = compute([0.0] * 7 + [1.0], "grpo")
    assert result.advantages[-1] == pytest.approx(7 / math.sqrt(8))
    assert compute([0.0] * 7 + [1.0], "maxrl").advantages[-1] == pytest.approx(7.0)
    assert compute([0.0] * 7 + [1.0], "pass@k").advantages[-1] == pytest.approx(math.sqrt(8))


@pytest.mark.parametrize("estimator", ALL)
@pytest.mark.parametrize(
    "values", [[0.5] * 4, [0.0] * 4, [0.5, 0.5, 0.5, 0.5 + 1e-7], [1e9, 1e9 + 1, 1e9, 1e9], [0.1 + 0.2, 0.3]]
)
def test_ties_and_float_noise_are_zero_variance(estimator, values):
    result = compute(values, estimator)
    assert result.verdict == "zero_variance"
    assert result.advantages == (0.0,) * len(values)


@pytest.mark.parametrize("estimator", ALL)
def test_a_small_real_spread_is_not_blown_up(estimator):
    result = compute([0.5, 0.5, 0.5, 0.5 + 1e-5], estimator)
    assert result.verdict == "trainable"
    assert max(map(abs, result.advantages)) < 0.02


def test_a_leave_one_out_std_would_have_exploded_here():
    assert max(map(abs, compute([0.35] * 7 + [0.95], "rloo").advantages)) == pytest.approx(0.6)


def test_pass_at_k_without_a_single_best_has_nothing_to_say():
    assert compute([0.0, 1.0, 1.0], "pass@k").verdict == "zero_variance"


@pytest.mark.parametrize("estimator", ALL)
def test_fewer_than_two_rewards_are_unscorable(estimator):
    assert compute([7.0], estimator).advantages == (0.0,)
    assert compute([7.0], estimator).verdict == "unscorable"
    assert compute([7.0], estimator).mean == 7.0
    assert compute([None, 7.0], estimator).advantages == (None, 0.0)
    empty = compute([], estimator)
    assert (empty.advantages, empty.verdict, empty.mean, empty.n_valid) == ((), "unscorable", None, 0)
    assert compute([None, None], estimator).advantages == (None, None)


def test_bad_input_is_refused():
    for bad in (math.nan, math.inf, -1e300):
        with pytest.raises(DataError, match="reward 1"):
            compute([0.0, bad])
    with pytest.raises(DataError, match="maxrl needs rewards"):
        compute([-1.0, 2.0], "maxrl")
    for lengths in ([1], [0, 0], [-1, 3]):
        with pytest.raises(DataError, match="opo needs"):
            compute([0.0, 1.0], "opo", lengths)
    with pytest.raises(DataError, match="opo needs"):
        group_advantage([0.0, 1.0], AdvantageConfig(estimator="opo"))
    with pytest.raises(ConfigError, match="std_floor"):
        AdvantageConfig(std_floor=0.0)
