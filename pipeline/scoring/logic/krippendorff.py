"""Krippendorff's alpha, exact and streaming: how far raters agree, beyond what their own spread would give.

In: units (the ratings of one sample, None where one is missing). Out: `Alpha`, an exact fraction. Units can be added,
removed and merged in any order with the same bits. alpha = 1 - D_o/D_e; units with fewer than two ratings do not count.
It is None, with the reason, where it is undefined: without variation it is not 1, since saturation, where reward
hacking ends, would read as perfect agreement. Source: Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability".

`IntervalAlpha` needs O(raters) time a unit and constant memory; `CategoryAlpha` (nominal, ordinal, ratio) keeps a
sparse coincidence table and is for values from a small set; `RaterReliability` adds alpha without each rater.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, combinations
from typing import Any, Literal, NamedTuple

__all__ = ["Alpha", "CategoryAlpha", "IntervalAlpha", "RaterReliability"]

_SCALE = float(1 << 32)


class Alpha(NamedTuple):
    """`value` is alpha, `exact` the same as a fraction, `observed` and `expected` are D_o and D_e, in squared units of
    the ratings for the interval metric. `units` counts those with two or more ratings. `reason` says why value is None.
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
    """

    __slots__ = ("n", "spread", "t1", "t2", "units")

    def __init__(self) -> None:
        self.n = 0
        self.t1 = 0
        self.t2 = 0
        self.units: dict[int, int] = {}  # m -> number of units
        self.spread: dict[int, int] = {}  # m -> N[m]

    def add(self, unit: Sequence[float | None]) -> None:
        """Add one unit. Raises ValueError on NaN or infinity."""
        values = _quantized(unit)
        self.add_sums(len(values), sum(values), sum([q * q for q in values]))

    def remove(self, unit: Sequence[float | None]) -> None:
        """Take back one unit that was added."""
        values = _quantized(unit)
        self.add_sums(len(values), sum(values), sum([q * q for q in values]), -1)

    def add_sums(self, m: int, s1: int, s2: int, times: int = 1) -> None:
        """Add a unit of m quantized ratings given as sums, `times` times (-1 takes it back)."""
        if m < 2:
            return
        self.n += times * m
        self.t1 += times * s1
        self.t2 += times * s2
        _bump(self.units, m, times)
        self.spread[m] = self.spread.get(m, 0) + times * (m * s2 - s1 * s1)
        if m not in self.units:
            del self.spread[m]

    def merge(self, other: "IntervalAlpha") -> None:
        """Add all units of another."""
        self.n += other.n
        self.t1 += other.t1
        self.t2 += other.t2
        for m, count in other.units.items():
            _bump(self.units, m, count)
            self.spread[m] = self.spread.get(m, 0) + other.spread[m]

    def alpha(self) -> Alpha:
        """Return alpha over the units held."""
        units = sum(self.units.values())
        if self.n == 0:
            return _undefined(units, None)
        unit = Fraction(1, 1 << 64)
        within = sum((Fraction(value, m - 1) for m, value in self.spread.items()), Fraction(0))
        observed = 2 * within * unit / self.n
        expected = 2 * (self.n * self.t2 - self.t1 * self.t1) * unit / (self.n * (self.n - 1))
        return _result(observed, expected, units)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as strings (msgpack-able)."""
        tables = {name: {str(m): str(v) for m, v in getattr(self, name).items()} for name in ("units", "spread")}
        return {"version": 1, "n": str(self.n), "t1": str(self.t1), "t2": str(self.t2), **tables}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "IntervalAlpha":
        """Undo `state_dict`."""
        made = cls()
        made.n, made.t1, made.t2 = int(state["n"]), int(state["t1"]), int(state["t2"])
        made.units = {int(m): int(v) for m, v in state["units"].items()}
        made.spread = {int(m): int(v) for m, v in state["spread"].items()}
        return made


class CategoryAlpha:
    """Nominal, ordinal or ratio metric over values from a small set. Memory: one count a pair of values seen."""

    def __init__(self, metric: Literal["nominal", "ordinal", "ratio"]) -> None:
        self.metric = metric
        self.units = 0
        self.counts: Counter[float] = Counter()  # n_c
        self.pairs: Counter[tuple[int, float, float]] = Counter()  # (m, c, k), c < k -> unordered pairs

    def add(self, unit: Sequence[float | None], times: int = 1) -> None:
        """Add one unit, `times` times. Raises ValueError on NaN, infinity, or a negative value under metric ratio."""
        values = sorted(_finite(unit))
        if self.metric == "ratio" and values and values[0] < 0:
            raise ValueError(f"the ratio metric needs values of at least 0, not {values[0]}.")
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
        self.add(unit, -1)

    def merge(self, other: "CategoryAlpha") -> None:
        """Add all units of another of the same metric."""
        if other.metric != self.metric:
            raise ValueError(f"cannot merge {other.metric} into {self.metric}.")
        self.units += other.units
        for value, count in other.counts.items():
            _bump(self.counts, value, count)
        for pair, count in other.pairs.items():
            _bump(self.pairs, pair, count)

    def alpha(self) -> Alpha:
        """Return alpha over the units held; O(V^2) in the number of distinct values."""
        values = sorted(self.counts)
        n = sum(self.counts.values())
        if n == 0:
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
        self.whole = IntervalAlpha()
        self.without = {name: IntervalAlpha() for name in raters}

    def add(self, unit: Mapping[str, float | None], times: int = 1) -> None:
        """Add one unit: rater -> rating, None or absent where missing. `times` of -1 takes it back."""
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
        if set(self.without) != set(other.without):
            raise ValueError(f"cannot merge reliability of {sorted(other.without)} into {sorted(self.without)}.")
        self.whole.merge(other.whole)
        for name, alpha in self.without.items():
            alpha.merge(other.without[name])

    def leave_one_out(self) -> dict[str, Alpha]:
        """Return rater -> alpha of the others."""
        return {name: alpha.alpha() for name, alpha in self.without.items()}


def _quantized(unit: Sequence[float | None]) -> list[int]:
    try:
        return [round(x * _SCALE) for x in unit if x is not None]
    except (ValueError, OverflowError) as error:  # rounding NaN or infinity to an integer
        raise ValueError(f"a rating is not finite ({error}); a missing rating is None.") from error


def _finite(unit: Sequence[float | None]) -> list[float]:
    values = [x for x in unit if x is not None]
    for x in values:
        if not math.isfinite(x):
            raise ValueError(f"a rating is {x}; a missing rating is None.")
    return values


def _bump(table: dict[Any, int], key: object, by: int) -> None:
    """Add to a count and drop it at 0, so that equal contents mean equal tables."""
    count = table.get(key, 0) + by
    if count:
        table[key] = count
    else:
        table.pop(key, None)


def _undefined(units: int, observed: float | None) -> Alpha:
    if units == 0:
        return Alpha(None, None, None, None, 0, "no unit has two or more ratings")
    return Alpha(None, None, observed, 0.0, units, "the ratings do not vary")


def _result(observed: Fraction, expected: Fraction, units: int) -> Alpha:
    if expected == 0:
        return _undefined(units, float(observed))
    exact = 1 - observed / expected
    return Alpha(float(exact), exact, float(observed), float(expected), units, None)
