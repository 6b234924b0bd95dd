"""Advantages of shaped groups: the formula, what bonuses can never do, and bounds."""

import itertools
import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lachesis.pipeline.normalizer.config.advantage import SHAPEABLE, AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.pipeline.normalizer.estimators.shaping import shaped_advantage
from lachesis.schemas.errors import DataError

GRPO = AdvantageConfig(estimator="grpo")
GROUPS = st.integers(2, 8).flatmap(
    lambda n: st.tuples(
        st.lists(st.sampled_from([0.0, 0.0, 0.25, 1.0]), min_size=n, max_size=n),
        st.lists(st.floats(0, 0.5), min_size=n, max_size=n),
    )
)


def failed_only(rewards, bonus):
    return [0.0 if r == 1.0 else b for r, b in zip(rewards, bonus, strict=True)]


def test_an_all_wrong_group_is_centred_in_units_of_the_bonus():
    """Divided by its own deviation a bonus of .05 would be a full-strength gradient towards length."""
    found = shaped_advantage([0.0] * 4, [0.05, 0.0, 0.0, 0.05], GRPO)
    assert found.advantages == pytest.approx((0.025, -0.025, -0.025, 0.025))
    assert (found.verdict, found.std, found.range) == ("zero_variance", 0.0, 0.0), "judged without the bonus"
    assert max(map(abs, group_advantage([0.05, 0.0, 0.0, 0.05], GRPO).advantages)) > 0.8


def test_a_mixed_group_is_divided_by_the_deviation_of_the_rewards_alone():
    rewards, bonus = [0.0, 0.0, 0.0, 1.0], [0.05, 0.0, 0.0, 0.0]
    found = shaped_advantage(rewards, bonus, GRPO)
    r = [a + b for a, b in zip(rewards, bonus, strict=True)]
    s = statistics.stdev(rewards)
    assert found.advantages == pytest.approx([(x - statistics.fmean(r)) / s for x in r])
    assert found.std == pytest.approx(s)
    assert found.verdict == "trainable"


@given(GROUPS, st.sampled_from(SHAPEABLE))
def test_bonuses_keep_the_verdict_the_order_and_the_bounds(group, estimator):
    rewards, bonus = group
    bonus = failed_only(rewards, bonus)
    config, lengths = AdvantageConfig(estimator=estimator), [1 + i for i in range(len(rewards))]
    plain = group_advantage(rewards, config, lengths)
    found = shaped_advantage(rewards, bonus, config, lengths)
    assert (found.verdict, found.mean, found.std, found.range) == (plain.verdict, plain.mean, plain.std, plain.range)
    r = [a + b for a, b in zip(rewards, bonus, strict=True)]
    order = sorted(range(len(r)), key=lambda i: r[i])
    values = [found.advantages[i] for i in order]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(values))
    most, n = max(map(abs, values)), len(r)
    if estimator == "grpo":
        assert most <= (n - 1) / math.sqrt(n) + 1e-9
        assert abs(math.fsum(values)) < 1e-6
    else:
        assert most <= (max(r) - min(r)) * (1 + 1e-9)


@given(GROUPS)
def test_grpo_is_the_textbook_formula_unless_a_bonus_outweighs_the_rewards(group):
    rewards, bonus = group
    bonus = [min(b, 0.3) for b in failed_only(rewards, bonus)]
    r = [a + b for a, b in zip(rewards, bonus, strict=True)]
    s = statistics.stdev(rewards)
    assume(max(bonus) - min(bonus) < max(rewards) - min(rewards) and s > statistics.stdev(r))
    expected = [(x - statistics.fmean(r)) / s for x in r]
    assert shaped_advantage(rewards, bonus, GRPO).advantages == pytest.approx(expected, abs=1e-9)


@given(GROUPS, st.sampled_from(SHAPEABLE))
def test_without_a_bonus_nothing_changes_to_the_bit(group, estimator):
    rewards, _ = group
    config, lengths = AdvantageConfig(estimator=estimator), [1] * len(rewards)
    expected = group_advantage(rewards, config, lengths)
    assert shaped_advantage(rewards, [0.0] * len(rewards), config, lengths) == expected
    assert shaped_advantage(rewards, [None] * len(rewards), config, lengths) == expected


def test_missing_rewards_stay_missing_and_one_alone_is_unscorable():
    found = shaped_advantage([0.0, None, 0.0], [0.1, None, 0.0], GRPO)
    assert found.advantages == (pytest.approx(0.05), None, pytest.approx(-0.05))
    assert shaped_advantage([0.0, None], [0.1, None], GRPO).verdict == "unscorable"


def test_estimators_that_would_blow_bonuses_up_are_refused():
    with pytest.raises(DataError, match="maxrl does not go with shaping"):
        shaped_advantage([0.0, 0.0], [0.1, 0.0], AdvantageConfig(estimator="maxrl"))
