"""Computes Krippendorff's alpha, exact and streaming.

Alpha measures how far raters agree beyond what their own spread would give.

From units (the ratings of one sample, None where one is missing) it computes an `AlphaEstimate`, an exact fraction.
Units can be added, removed and merged in any order with the same bits. alpha = 1 - D_o/D_e; units with fewer than two
ratings do not count. Alpha is None, with the reason, where it is undefined. Without variation it is not 1, because then
saturation, the end of reward hacking, would look like perfect agreement. Source: Krippendorff 2011, "Computing
Krippendorff's Alpha-Reliability".

`IntervalAlpha` needs O(raters) time a unit and constant memory; `CategoryAlpha` (nominal, ordinal, ratio) keeps a
sparse coincidence table and is for values from a small set; `RaterReliability` adds alpha without each rater.

Ratings may be any finite numbers; `IntervalAlpha` does not distinguish ratings that round to the same multiple of
2^-32. A value that is no rating (text, NaN, infinity, an array) raises `DataError` and changes nothing. Tested with
offsets up to 1e9, scales from 1e-6 to 1e6, and single ratings up to 1.8e308.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, combinations
from typing import Any, Literal, NamedTuple, get_args

from lachesis.pipeline.common.number_arguments import check_kind, listed, number_column
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["AlphaEstimate", "CategoryAlpha", "IntervalAlpha", "RaterReliability"]

_SCALE = float(1 << 32)

_LARGE = 1e200
"""From here on a rating has no digits after the point, and one that is scaled may be too large for a float."""

CategoryMetric = Literal["nominal", "ordinal", "ratio"]


class AlphaEstimate(NamedTuple):
    """`value` is alpha, `exact` the same as a fraction, `observed` and `expected` are D_o and D_e, in squared units of
    the ratings for the interval metric. `units` counts those with two or more ratings. `reason` says why value is None.
    Values too large for a float are inf in `observed` and `expected`.
    """

    value: float | None
    exact: Fraction | None
    observed: float | None
    expected: float | None
    units: int
    reason: str | None


class IntervalAlpha:
    """Interval metric, delta^2 = (c-k)^2. Ratings are rounded to 2^-32 and summed as integers.

    From sum over ordered pairs (x_i-x_j)^2 = 2 (m S2 - S1^2), with S1 = sum x and S2 = sum x^2 of a unit of m ratings:
    alpha = 1 - (n-1) sum_m N[m]/(m-1) / (n T2 - T1^2), n = sum m, T1 = sum S1, T2 = sum S2, N[m] = sum m S2 - S1^2.
    Held are, by m, the number of units and their sums of S1, S2 and S1^2.
    """

    __slots__ = ("sums",)

    def __init__(self) -> None:
        self.sums: dict[int, list[int]] = {}

    def add_unit(self, unit: Sequence[float | None], times: int = 1) -> None:
        """Add one unit; `times` of -1 takes back one that was added."""
        # Called for every sample there is, so it calls nothing of ours: that would cost as much as the arithmetic
        try:
            values = [round(x * _SCALE) for x in unit if x is not None]
        except (TypeError, ValueError, OverflowError):
            values = _quantized(unit)
        m = len(values)
        if m < 2:
            return
        s1 = sum(values)
        sums = self.sums.get(m)
        if sums is None:
            sums = self.sums[m] = [0, 0, 0, 0]
        sums[0] += times
        sums[1] += times * s1
        sums[2] += times * sum([q * q for q in values])
        sums[3] += times * s1 * s1
        if not any(sums):  # dropped, so that equal contents mean equal tables
            del self.sums[m]

    def remove(self, unit: Sequence[float | None]) -> None:
        """Take back one unit that was added."""
        self.add_unit(unit, -1)

    def add_sums(self, m: int, s1: int, s2: int, times: int = 1) -> None:
        """Add a unit of m quantized ratings given as sums, `times` times (-1 takes it back)."""
        if m > 1:
            self._add_unit(m, (times, times * s1, times * s2, times * s1 * s1))

    def merge(self, other: "IntervalAlpha") -> None:
        """Add all units of another."""
        check_kind("what is merged", other, IntervalAlpha)
        for m, sums in other.sums.items():
            self._add_unit(m, sums)

    def _add_unit(self, m: int, sums: Sequence[int]) -> None:
        total = [a + b for a, b in zip(self.sums.get(m, (0, 0, 0, 0)), sums, strict=True)]
        if any(total):
            self.sums[m] = total
        else:
            self.sums.pop(m, None)

    def alpha(self) -> AlphaEstimate:
        """Return alpha over the units held."""
        units = sum(sums[0] for sums in self.sums.values())
        n = sum(m * sums[0] for m, sums in self.sums.items())
        if units <= 0 or n < 2:  # as long as more was taken back than added
            return _undefined(units, None)
        t1, t2 = (sum(sums[i] for sums in self.sums.values()) for i in (1, 2))
        unit = Fraction(1, 1 << 64)
        within = sum((Fraction(m * s2 - squares, m - 1) for m, (_, _, s2, squares) in self.sums.items()), Fraction(0))
        observed = 2 * within * unit / n
        expected = 2 * (n * t2 - t1 * t1) * unit / (n * (n - 1))
        return _result(observed, expected, units)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as strings (msgpack-able)."""
        return {"version": 2, "sums": {str(m): [str(value) for value in sums] for m, sums in self.sums.items()}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "IntervalAlpha":
        """Undo `state_dict`. Raises `DataError` on what it never returned."""
        made = cls()
        check_kind("state of an alpha", state, Mapping)
        try:
            made.sums = {int(m): [int(value) for value in sums] for m, sums in state["sums"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(
                f"state of an alpha: {error!r}; give what `state_dict` returned, it is {state!r:.80}."
            ) from error
        if any(m < 2 or len(sums) != 4 for m, sums in made.sums.items()):
            raise DataError(
                f"state of an alpha: needs four sums of each number of ratings from 2 on, is {state!r:.80}."
            )
        return made


class CategoryAlpha:
    """Nominal, ordinal or ratio metric over values from a small set. Memory: one count a pair of values seen."""

    def __init__(self, metric: CategoryMetric) -> None:
        """Raises `ConfigError` on another metric."""
        if not isinstance(metric, str) or metric not in get_args(CategoryMetric):
            known = ", ".join(get_args(CategoryMetric))
            raise ConfigError(f"metric is {metric!r}; choose one of {known}, or `IntervalAlpha` for interval.")
        self.metric = metric
        self.units = 0
        self.counts: Counter[float] = Counter()  # n_c
        self.pairs: Counter[tuple[int, float, float]] = Counter()  # (m, c, k), c < k -> unordered pairs

    def add_unit(self, unit: Sequence[float | None], times: int = 1) -> None:
        """Add one unit, `times` times.

        Raises `DataError` on what is no finite number, and on a negative value under metric ratio.
        """
        values = sorted(_present(unit))
        if self.metric == "ratio" and values and values[0] < 0:
            raise DataError(f"the ratio metric needs values of at least 0, not {values[0]}.")
        m = len(values)
        if m < 2:
            return
        self.units += times
        for value in values:
            _bump(self.counts, value, times)
        for c, k in combinations(values, 2):
            if c != k:
                _bump(self.pairs, (m, c, k), times)

    def remove(self, unit: Sequence[float | None]) -> None:
        """Take back one unit that was added."""
        self.add_unit(unit, -1)

    def merge(self, other: "CategoryAlpha") -> None:
        """Add all units of another of the same metric."""
        check_kind("what is merged", other, CategoryAlpha)
        if other.metric != self.metric:
            raise DataError(f"cannot merge {other.metric} into {self.metric}.")
        self.units += other.units
        for value, count in other.counts.items():
            _bump(self.counts, value, count)
        for pair, count in other.pairs.items():
            _bump(self.pairs, pair, count)

    def alpha(self) -> AlphaEstimate:
        """Return alpha over the units held; O(V^2) in the number of distinct values."""
        values = sorted(self.counts)
        n = sum(self.counts.values())
        if self.units <= 0 or n < 2:
            return _undefined(self.units, None)
        below = dict(zip(values, accumulate((self.counts[v] for v in values), initial=0), strict=False))
        # Each unordered pair stands for two ordered ones, in both D_o and D_e.
        within = sum(
            (Fraction(2 * count, m - 1) * self._delta(c, k, below) for (m, c, k), count in self.pairs.items()),
            Fraction(0),
        )
        between = sum(
            (2 * self.counts[c] * self.counts[k] * self._delta(c, k, below) for c, k in combinations(values, 2)),
            Fraction(0),
        )
        return _result(within / n, between / (n * (n - 1)), self.units)

    def _delta(self, c: float, k: float, below: Mapping[float, int]) -> Fraction:
        """Squared distance of two values c < k."""
        if self.metric == "nominal":
            return Fraction(1)
        if self.metric == "ratio":
            return ((Fraction(c) - Fraction(k)) / (Fraction(c) + Fraction(k))) ** 2
        between = below[k] + self.counts[k] - below[c]  # ratings from c to k, both included
        return (between - Fraction(self.counts[c] + self.counts[k], 2)) ** 2


class RaterReliability:
    """Interval alpha of an ensemble, and of the ensemble without each of its raters: a rater whose absence raises alpha
    is at odds with the others.
    """

    def __init__(self, raters: Sequence[str]) -> None:
        """`raters`: their names. Raises `DataError` on what is no name."""
        raters = list(raters) if isinstance(raters, str) else listed("rater", raters)
        for name in raters:
            check_kind("the name of a rater", name, str)
        self.whole = IntervalAlpha()
        self.without = {name: IntervalAlpha() for name in raters}

    def add_unit(self, unit: Mapping[str, float | None], times: int = 1) -> None:
        """Add one unit: rater -> rating, None or absent where missing. `times` of -1 takes it back."""
        if not isinstance(unit, Mapping):
            raise DataError(f"a unit is {unit!r:.80}; give a table of ratings by rater.")
        names = [name for name, x in unit.items() if x is not None]
        values = dict(zip(names, _quantized([unit[name] for name in names]), strict=True))
        m, s1, s2 = len(values), sum(values.values()), sum([q * q for q in values.values()])
        self.whole.add_sums(m, s1, s2, times)
        for name, alpha in self.without.items():
            q = values.get(name)
            if q is None:
                alpha.add_sums(m, s1, s2, times)
            else:
                alpha.add_sums(m - 1, s1 - q, s2 - q * q, times)

    def merge(self, other: "RaterReliability") -> None:
        """Add all units of another over the same raters."""
        check_kind("what is merged", other, RaterReliability)
        if set(self.without) != set(other.without):
            raise DataError(f"cannot merge reliability of {sorted(other.without)} into {sorted(self.without)}.")
        self.whole.merge(other.whole)
        for name, alpha in self.without.items():
            alpha.merge(other.without[name])

    def leave_one_out(self) -> dict[str, AlphaEstimate]:
        """Return rater -> alpha of the others."""
        return {name: alpha.alpha() for name, alpha in self.without.items()}


def _quantized(unit: Sequence[float | None]) -> list[int]:
    return [round(x * _SCALE) if abs(x) < _LARGE else int(x) << 32 for x in _present(unit)]


def _present(unit: Sequence[float | None]) -> list[float]:
    """Return the ratings of a unit that are there. Raises `DataError` on what is no finite number."""
    return [x for x in number_column("rating", unit) if x is not None]


def _bump(table: dict[Any, int], key: object, by: int) -> None:
    """Add to a count and drop it at 0, so that equal contents mean equal tables."""
    count = table.get(key, 0) + by
    if count:
        table[key] = count
    else:
        table.pop(key, None)


def _undefined(units: int, observed: float | None) -> AlphaEstimate:
    if units <= 0:
        return AlphaEstimate(None, None, None, None, 0, "no unit has two or more ratings")
    return AlphaEstimate(None, None, observed, 0.0, units, "the ratings do not vary")


def _result(observed: Fraction, expected: Fraction, units: int) -> AlphaEstimate:
    if expected == 0:
        return _undefined(units, _as_float(observed))
    exact = 1 - observed / expected
    return AlphaEstimate(float(exact), exact, _as_float(observed), _as_float(expected), units, None)


def _as_float(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:  # the square of a rating above 1e154
        return math.inf
