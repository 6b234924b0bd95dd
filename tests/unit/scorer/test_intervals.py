"""Confidence intervals of alpha: coverage where the truth is known and samples of a group are alike, at any scale."""

import math
import random

import numpy as np
import pytest

from lachesis.pipeline.scorer.logic.intervals import (
    MIN_GROUPS,
    StreamingCI,
    alpha_interval,
    alphas_without_each,
    jackknife_error,
    student,
)
from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha
from lachesis.schemas.errors import DataError

RATERS, SAMPLES, NOISE = 3, 8, 0.5
TRUE_ALPHA = 1.0 / (1.0 + NOISE**2)
"""Variance between samples over all variance: the interval alpha of the model in the limit."""


def recorded(groups: int, correlation: float, rng: np.random.Generator, missing: float = 0.0):
    """Units and their groups. Truths, of variance 1, and errors of one rater are correlated within a group."""

    def correlated(columns: int) -> np.ndarray:
        common, own = rng.normal(size=(groups, 1, columns)), rng.normal(size=(groups, SAMPLES, columns))
        return math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own

    ratings = correlated(1) + NOISE * correlated(RATERS)
    units = [[None if rng.random() < missing else x for x in unit] for unit in ratings.reshape(-1, RATERS).tolist()]
    return units, [i // SAMPLES for i in range(len(units))]


@pytest.mark.slow
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("groups", [20, 60])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(groups: int, correlation: float) -> None:
    rng = np.random.default_rng(groups)
    held, trials = 0, 240
    for _ in range(trials):
        found = alpha_interval(*recorded(groups, correlation, rng))
        assert found is not None
        held += found.low <= TRUE_ALPHA <= found.high
    assert 0.91 <= held / trials <= 0.99  # three standard errors of .95


def test_samples_taken_for_independent_would_make_it_too_narrow() -> None:
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(100):
        units, _ = recorded(30, 0.7, rng)
        found = alpha_interval(units)
        assert found is not None
        held += found.low <= TRUE_ALPHA <= found.high
    assert held < 80


def brute_force(units, groups, level_quantile):
    """The jackknife with alpha from all pairs of ratings, in floats."""

    def alpha(kept):
        values = [[x for x in unit if x is not None] for unit in kept]
        values = [unit for unit in values if len(unit) > 1]
        n = sum(map(len, values))
        within = sum((a - b) ** 2 / (len(unit) - 1) for unit in values for a in unit for b in unit) / n
        every = np.array([x for unit in values for x in unit])
        return 1 - within / (((every[:, None] - every) ** 2).sum() / (n * (n - 1)))

    names = sorted(set(groups))
    without = [alpha([u for u, g in zip(units, groups, strict=True) if g != name]) for name in names]
    error = math.sqrt((len(names) - 1) ** 2 / len(names)) * np.std(without, ddof=1)
    return alpha(units) - level_quantile * error, alpha(units) + level_quantile * error


def test_against_brute_force_with_missing_ratings() -> None:
    units, groups = recorded(20, 0.5, np.random.default_rng(5), missing=0.3)
    found = alpha_interval(units, groups)
    low, high = brute_force(units, groups, 2.0930240544)  # of Student's t, .975, 19 degrees of freedom
    assert found is not None
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    assert found.groups == 20


@pytest.mark.parametrize(
    ("probability", "degrees", "tabulated"),
    [(0.975, 15, 2.13145), (0.975, 19, 2.09302), (0.995, 19, 2.86093), (0.9975, 60, 2.91455), (0.95, 199, 1.65255)],
)
def test_quantiles_of_students_t_are_the_tabulated_ones(probability: float, degrees: int, tabulated: float) -> None:
    assert student(probability, degrees) == pytest.approx(tabulated, abs=5e-4)


@pytest.mark.parametrize("offset", [0.0, 1e3, -1e6, 1e9])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4, 1e6])
def test_neither_offset_nor_scale_changes_the_interval(offset: float, scale: float) -> None:
    units, groups = recorded(24, 0.3, np.random.default_rng(6), missing=0.1)
    expected = alpha_interval(units, groups)
    moved = [[None if x is None else offset + scale * x for x in unit] for unit in units]
    found = alpha_interval(moved, groups)
    assert expected is not None
    if scale / 1e4 < np.spacing(abs(offset)):  # floats do not tell the ratings apart
        return
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-3)


@pytest.mark.parametrize("extreme", [1e155, 1e300, -1.7e308])
def test_no_finite_rating_is_too_large(extreme: float) -> None:
    units, groups = recorded(24, 0.3, np.random.default_rng(7))
    found = alpha_interval([*units, [extreme, extreme / 2, 0.0]], [*groups, 0])
    assert found is None or -1.0 <= found.low <= found.high <= 1.0


def test_order_sharding_and_a_way_back_leave_the_same_bits() -> None:
    units, groups = recorded(30, 0.3, np.random.default_rng(2), missing=0.2)
    straight = StreamingCI()
    for name, unit in zip(groups, units, strict=True):
        straight.add_unit(str(name), unit)
    shuffled = list(zip(groups, units, strict=True))
    random.Random(0).shuffle(shuffled)
    shards = [StreamingCI(), StreamingCI()]
    shards[0].add_unit("extra", [1.0, 0.0], -1)
    for i, (name, unit) in enumerate(shuffled):
        shards[i % 2].add_unit(str(name), unit)
    shards[0].add_unit("extra", [1.0, 0.0])
    shards[0].merge(shards[1])
    assert straight.interval() is not None
    assert shards[0].interval() == straight.interval()
    assert StreamingCI.from_state_dict(straight.state_dict()).interval() == straight.interval()


def test_without_each_group_alpha_is_that_of_the_others() -> None:
    units, groups = recorded(5, 0.5, np.random.default_rng(8), missing=0.3)
    parts = [IntervalAlpha() for _ in range(5)]
    for name, unit in zip(groups, units, strict=True):
        parts[name].add_unit(unit)
    for i, found in enumerate(alphas_without_each(parts)):
        others = IntervalAlpha()
        for part in parts[:i] + parts[i + 1 :]:
            others.merge(part)
        assert found == pytest.approx(others.alpha().value, abs=1e-12)
    assert alphas_without_each([]) == []
    assert jackknife_error([]) is None
    assert jackknife_error([0.5, None]) is None


@pytest.mark.parametrize(
    "units", [[], [[1.0, None]] * 30, [[0.5, 0.5]] * 100, [[0.5, 0.5], [0.4, 0.4]] * 20, [[1.0, 0.0]]], ids=str
)
def test_what_is_undefined_has_no_interval(units: list[list[float | None]]) -> None:
    assert alpha_interval(units) is None


def test_with_few_groups_there_is_none_however_many_samples_they_have() -> None:
    units, groups = recorded(MIN_GROUPS, 0.3, np.random.default_rng(9))
    assert alpha_interval(units, groups) is not None
    fewer = [(unit, name) for unit, name in zip(units, groups, strict=True) if name]
    assert alpha_interval([unit for unit, _ in fewer] * 9, [name for _, name in fewer] * 9) is None


def test_groups_and_units_must_be_as_many() -> None:
    with pytest.raises(DataError, match="2 names for 1 units"):
        alpha_interval([[0.0, 1.0]], ["a", "b"])
