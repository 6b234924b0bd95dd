"""Alpha: the published values exactly, a slow textbook oracle on random data, and streams in any order."""

import random
from fractions import Fraction
from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.scorer.logic.krippendorff import CategoryAlpha, IntervalAlpha, RaterReliability
from lachesis.schemas.errors import ConfigError

# Krippendorff 2011, section E: raters A-D over 12 units.
PUBLISHED = """
1 2 3 3 2 1 4 1 2 . . .
1 2 3 3 2 2 4 1 2 5 . 3
. 3 3 3 2 3 4 2 2 5 1 .
1 2 3 3 2 4 4 1 2 5 1 .
"""
ROWS = [[None if x == "." else int(x) for x in line.split()] for line in PUBLISHED.strip().splitlines()]
UNITS = [list(column) for column in zip(*ROWS, strict=True)]


def make(metric):
    return IntervalAlpha() if metric == "interval" else CategoryAlpha(metric)


@pytest.mark.parametrize(
    ("metric", "numerator", "denominator"),
    [("nominal", 113, 152), ("ordinal", 108577, 133160), ("interval", 951, 1120), ("ratio", 18222619, 22852465)],
)
def test_published_values_exactly(metric, numerator, denominator):
    alpha = make(metric)
    for unit in UNITS:
        alpha.add_unit(unit)
    result = alpha.alpha()
    assert result.exact == Fraction(numerator, denominator)
    assert result.value == numerator / denominator
    assert result.units == 11


def textbook(units, metric):
    """Alpha from the full coincidence matrix, as the 2011 paper writes it."""
    units = [[Fraction(x) for x in unit if x is not None] for unit in units]
    units = [unit for unit in units if len(unit) >= 2]
    values = sorted({x for unit in units for x in unit})
    o = {(c, k): Fraction(0) for c in values for k in values}
    for unit in units:
        for c, k in permutations(unit, 2):
            o[c, k] += Fraction(1, len(unit) - 1)
    n_c = {c: sum(o[c, k] for k in values) for c in values}
    n = sum(n_c.values())

    def delta(c, k):
        if metric == "nominal":
            return Fraction(c != k)
        if metric == "interval":
            return (c - k) ** 2
        if metric == "ratio":
            return ((c - k) / (c + k)) ** 2 if c + k else Fraction(0)
        low, high = min(c, k), max(c, k)
        return (sum(n_c[g] for g in values if low <= g <= high) - (n_c[c] + n_c[k]) / 2) ** 2

    if not n:
        return None
    observed = sum(o[c, k] * delta(c, k) for c in values for k in values) / n
    expected = sum(n_c[c] * n_c[k] * delta(c, k) for c in values for k in values if c != k) / (n * (n - 1))
    return None if expected == 0 else 1 - observed / expected


@pytest.mark.parametrize("metric", ["nominal", "ordinal", "interval", "ratio"])
def test_against_the_textbook_on_random_data_with_missing_ratings(metric):
    rng = random.Random(metric)
    undefined = 0
    for _ in range(300):
        raters, n_units, levels = rng.randint(1, 5), rng.randint(1, 8), rng.randint(1, 5)
        step = rng.choice([1, 0.25])
        missing = rng.choice([0, 0.2, 0.6])
        units = [
            [None if rng.random() < missing else rng.randrange(levels) * step for _ in range(raters)]
            for _ in range(n_units)
        ]
        alpha = make(metric)
        for unit in units:
            alpha.add_unit(unit)
        result, expected = alpha.alpha(), textbook(units, metric)
        assert result.exact == expected
        assert (result.reason is None) == (expected is not None)
        undefined += expected is None
    assert 0 < undefined < 150


ratings = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=5)


@given(st.lists(ratings, max_size=12), st.randoms(use_true_random=False))
def test_any_order_sharding_and_removal_gives_the_same_bits(units, rng):
    whole = IntervalAlpha()
    for unit in units:
        whole.add_unit(unit)
    parts = [IntervalAlpha(), IntervalAlpha()]
    noise = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(3)]
    for unit in rng.sample(units + noise, len(units) + len(noise)):
        parts[rng.random() < 0.5].add_unit(unit)
    parts[0].merge(parts[1])
    for unit in noise:
        parts[0].remove(unit)
    assert parts[0].alpha() == whole.alpha()
    assert parts[0].state_dict() == whole.state_dict()
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(whole.state_dict()))
    assert IntervalAlpha.from_state_dict(state).alpha() == whole.alpha()


@pytest.mark.parametrize("metric", ["nominal", "ordinal", "ratio"])
def test_categories_merge_and_remove(metric):
    whole, left, right = make(metric), make(metric), make(metric)
    for i, unit in enumerate(UNITS):
        whole.add_unit(unit)
        (left if i % 2 else right).add_unit(unit)
    left.add_unit([9, 9, 8])
    left.merge(right)
    left.remove([8, 9, 9])
    assert left.alpha() == whole.alpha()
    assert left.pairs == whole.pairs


def test_leave_one_out_equals_alpha_over_the_others():
    rng = random.Random(5)
    units = [{name: rng.choice([None, rng.random()]) for name in "abcd"} for _ in range(200)]
    reliability = RaterReliability("abcd")
    for unit in units:
        reliability.add_unit(unit)
    for name, result in reliability.leave_one_out().items():
        others = IntervalAlpha()
        for unit in units:
            others.add_unit([x for rater, x in unit.items() if rater != name])
        assert result == others.alpha()


def test_a_contrary_rater_is_found_and_merging_keeps_the_bits():
    rng = random.Random(6)
    whole, left, right = (RaterReliability("abcx") for _ in range(3))
    for i in range(300):
        truth = rng.random()
        unit = {name: truth + rng.gauss(0, 0.1) for name in "abc"} | {"x": rng.random()}
        whole.add_unit(unit)
        (left if i % 3 else right).add_unit(unit)
    left.merge(right)
    assert left.leave_one_out() == whole.leave_one_out()
    without = {name: alpha.value for name, alpha in whole.leave_one_out().items()}
    assert max(without, key=without.get) == "x"
    assert without["x"] > whole.whole.alpha().value + 0.2


@pytest.mark.parametrize("metric", ["nominal", "ordinal", "interval", "ratio"])
def test_undefined_is_none_with_a_reason(metric):
    alpha = make(metric)
    assert alpha.alpha().reason == "no unit has two or more ratings"
    alpha.add_unit([1.0, None])
    alpha.add_unit([])
    assert alpha.alpha().value is None
    alpha.add_unit([1.0, 1.0])
    alpha.add_unit([1.0, 1.0, 1.0])
    result = alpha.alpha()
    assert (result.value, result.reason, result.units) == (None, "the ratings do not vary", 2)
    assert result.observed == 0.0


@pytest.mark.parametrize("metric", ["nominal", "ordinal", "interval", "ratio"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_refused(metric, bad):
    alpha = make(metric)
    with pytest.raises(ValueError, match="a missing one is None"):
        alpha.add_unit([1.0, bad])
    assert alpha.alpha().units == 0


@pytest.mark.parametrize("metric", ["interval", "ordinals", "", None, 1])
def test_an_unknown_metric_is_refused_with_those_there_are(metric):
    with pytest.raises(ConfigError, match="choose one of nominal, ordinal, ratio"):
        CategoryAlpha(metric)


@pytest.mark.parametrize("metric", ["nominal", "ordinal", "interval", "ratio"])
def test_units_may_be_taken_back_before_they_are_added(metric):
    alpha = make(metric)
    alpha.remove([1.0, 2.0])
    assert alpha.alpha().value is None
    alpha.add_unit([4.0, 7.0])
    assert alpha.alpha().value is None
    alpha.add_unit([1.0, 2.0])
    alpha.add_unit([4.0, 5.0])
    other = make(metric)
    other.add_unit([4.0, 5.0])
    other.add_unit([4.0, 7.0])
    assert alpha.alpha() == other.alpha()


def test_every_finite_rating_counts():
    alpha, scaled = IntervalAlpha(), IntervalAlpha()
    for unit in ([1.0, 0.5], [0.25, -1.0], [0.0, 0.0]):
        alpha.add_unit(unit)
        scaled.add_unit([1.7e308 * x for x in unit])
    assert scaled.alpha().value == pytest.approx(alpha.alpha().value)
    assert scaled.alpha().observed == float("inf")


def test_the_ratio_metric_refuses_negative_values():
    with pytest.raises(ValueError, match="at least 0"):
        CategoryAlpha("ratio").add_unit([-1.0, 2.0])


def test_timeouts_written_as_zero_would_look_like_disagreement():
    rng = random.Random(7)
    missing, zeroed = IntervalAlpha(), IntervalAlpha()
    for _ in range(3000):
        truth = rng.random()
        unit = [truth + rng.gauss(0, 0.15) for _ in range(4)]
        lost = rng.random() < 0.1
        missing.add_unit([None if lost else unit[0], *unit[1:]])
        zeroed.add_unit([0.0 if lost else unit[0], *unit[1:]])
    assert zeroed.alpha().value < missing.alpha().value - 0.03
