"""Whatever finite numbers come, the public functions of rewards and of the health checks return finite ones, or refuse.

A refusal is an error of the project's own; see tests/unit/test_any_number.py for the machines that use them.
"""

import math
import warnings
from contextlib import suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lachesis.pipeline.batcher.whitening import whiten
from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.logic.check import HealthWindow, finite, graded, is_number, mean
from lachesis.pipeline.health.logic.monitor import _checks
from lachesis.pipeline.health.logic.trends import (
    correlation,
    longer_share,
    rank_correlation,
    scaled_deviations,
    slope_t,
    student_z,
)
from lachesis.pipeline.normalizer.config.advantage import SHAPEABLE, AdvantageConfig
from lachesis.pipeline.normalizer.estimators.shaping import shaped_advantage
from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE, MomentAccumulator, fold
from lachesis.pipeline.normalizer.logic.ranks import RankCounts, RankTable
from lachesis.pipeline.normalizer.logic.reliability import residuals, shares, weighted
from lachesis.schemas.annotations import GroupReward, GroupScore
from lachesis.schemas.errors import DataError

ANY = st.floats(allow_nan=False, allow_infinity=False)
COLUMN = st.lists(st.none() | ANY, min_size=1, max_size=16)
"""Hypothesis draws subnormals and the largest floats by preference."""
ACCEPTED = st.floats(-MAX_ABS_VALUE, MAX_ABS_VALUE)
"""What the normalizer lets through to its statistics."""


@pytest.fixture(autouse=True)
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def assert_finite(*values):
    assert all(value is None or math.isfinite(value) for value in values), values


@given(st.lists(ANY, min_size=1, max_size=20), st.lists(ANY, min_size=1, max_size=20))
def test_trends(one, other):
    scaled = scaled_deviations(one)
    assert_finite(*scaled, slope_t(one))
    assert max(map(abs, scaled)) <= 1
    n = min(len(one), len(other))
    rho = rank_correlation(one[:n], other[:n])
    assert rho is None or -1 <= rho <= 1
    share, z = longer_share(sorted(one), sorted(other))
    assert 0 <= share <= 1
    assert_finite(z, student_z(one[0], 7), mean(one), finite_mean(one))
    assert len(list(finite(one))) == sum(map(is_number, one))
    assert graded(one[0], [(0.5, "warn")])[0] in {"ok", "warn"}
    r = correlation(one[0], abs(other[0]), abs(other[-1]))
    assert r is None or -1 <= r <= 1


@given(st.lists(ANY, min_size=2, max_size=12), st.sampled_from([1e-3, 1.0, 1e3]), st.booleans())
def test_the_mean_lies_among_its_values(values, scale, alike):
    values = [values[0]] * len(values) if alike else values
    found = finite_mean(values)
    slack = 1e-9 * max(map(abs, values))
    assert min(values) - slack <= found <= max(values) + slack


@pytest.mark.slow
@settings(max_examples=60)
@example([[8.988465674311579e307, 8.98846567431158e307]], 0)  # whose sum is no number
@given(st.lists(COLUMN, min_size=1, max_size=12), st.integers(0, 2**63 - 1))
def test_every_check_alone(columns, length):
    scores, rewards = [], []
    for n, column in enumerate(columns, 1):
        name = f"{n:032x}"
        scores.append(GroupScore(
            group=name, seq=n, item="i", policy_step=0, scores=column, ratings={"a": column, "b": column[::-1]},
            lengths=[length] * len(column),
        ))  # fmt: skip
        rewards.append(GroupReward(
            group=name, seq=n, item="i", policy_step=0, verdict="trainable", scores=column, rewards=column,
            advantages=column, snapshot="s", mean=None, std=None, range=None, n_valid=len(column),
        ))  # fmt: skip
    before = [x for column in columns for x in column if is_number(x)] * 80
    window = HealthWindow(scores=scores * 8, rewards=rewards, before=before, estimator="grpo")
    for check in _checks(HealthConfig()):
        for _ in range(4):
            result = check.evaluate(window)
            assert_finite(result.value, result.threshold)


@given(COLUMN, st.data())
def test_weights_of_raters(column, data):
    """Ratings are calibrated to [0, 1], or an environment's own."""
    others = data.draw(st.lists(st.none() | ANY, min_size=len(column), max_size=len(column)))
    ratings = {"a": column, "b": others, "c": column[::-1]}
    with suppress(DataError):
        for found in residuals(ratings).values():
            assert_finite(*found)
    weights = shares({name: abs(x or 0.0) for name, x in zip("abc", [*column, 1.0, 1.0], strict=False)})
    assert_finite(*weights.values())
    assert math.isclose(sum(weights.values()), 1.0)
    accepted = {name: [None if x is None else max(-MAX_ABS_VALUE, min(MAX_ABS_VALUE, x)) for x in found]
                for name, found in ratings.items()}  # fmt: skip
    with suppress(DataError):  # a share of 0
        assert_finite(*weighted(accepted, column, weights))


def test_ratings_without_a_mean_are_refused():
    with pytest.raises(DataError, match="too large"):
        residuals({"a": [1.7e308], "b": [1.7e308], "c": [1.7e308]})
    with pytest.raises(DataError, match="too large"):
        residuals({"a": [1.7e308], "b": [-1.7e308]})


@given(st.lists(st.lists(st.none() | ACCEPTED, min_size=1, max_size=8), min_size=1, max_size=8))
def test_statistics_of_what_the_normalizer_accepts(groups):
    moments, counts = MomentAccumulator(), RankCounts()
    for column in groups:
        moments.add_group(column)
        counts.add_group(column)
    found = fold([(1, moments)])
    values = [x for column in groups for x in column if x is not None]
    if not values:
        assert found is None
        return
    assert_finite(found.mean, found.std, found.low, found.high)
    table = RankTable.of([(1, counts)])
    assert all(0 <= table.rank(x) <= 1 for x in values)


@given(COLUMN, st.lists(st.none() | ANY, min_size=16, max_size=16), st.sampled_from(sorted(SHAPEABLE)))
def test_shaped_advantages(rewards, bonus, estimator):
    with suppress(DataError):
        found = shaped_advantage(
            rewards, bonus[: len(rewards)], AdvantageConfig(estimator=estimator), [3] * len(rewards)
        )
        assert_finite(*found.advantages, found.mean, found.std, found.range)


@given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=16), st.integers(0, 2**40))
def test_whitening(advantages, tokens):
    with suppress(DataError):
        assert_finite(*whiten(advantages, [tokens] * len(advantages)))
