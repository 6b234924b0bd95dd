"""Confidence intervals of Krippendorff's alpha, interval metric, by a jackknife over groups.

It takes units as for `IntervalAlpha`, each with its sample's group, and returns an interval, or None. The samples of a
group answer one prompt, so they are alike, and an interval that takes them for independent is too narrow. So the
jackknife leaves out a whole group at a time, and the half-width uses Student's t with one degree of freedom less than
there are groups. Below `MIN_GROUPS` groups there is no interval.

All sums are exact integers, so neither an offset nor the scale of the ratings matters, and units may come in any order,
over any number of processes, and give the same bits. Tested with offsets up to 1e9 and scales from 1e-6 to 1e6.
Coverage of the 95 % interval, measured with 20 to 200 groups of 2 to 16 samples at correlations of 0, .3 and .7 within
a group, of truths and errors: .94 to .96 with normal ratings, where samples taken for independent give .95 down to .51;
.93 to .96 with clipped and binary ones; down to .88 with heavy tails (Student's t with 4 degrees of freedom).
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from lachesis.pipeline.common.number_arguments import check_kind, listed
from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha
from lachesis.schemas.errors import DataError

__all__ = [
    "MIN_GROUPS",
    "Interval",
    "StreamingCI",
    "alpha_interval",
    "alphas_without_each",
    "jackknife_error",
    "student",
]

MIN_GROUPS = 20
"""Groups with two ratings of a sample that an interval takes."""


class Interval(NamedTuple):
    """`low` and `high` hold alpha with probability `level`, as estimated from `groups` groups."""

    low: float
    high: float
    level: float
    groups: int


def alpha_interval(
    units: Sequence[Sequence[float | None]], groups: Sequence[Hashable] | None = None, *, level: float = 0.95
) -> Interval | None:
    """Return the interval over recorded units.

    `groups` has the group of each unit; None: the units are independent, each a group by itself. None is returned as
    `StreamingCI.interval` says. Raises `DataError` on ratings that are no finite numbers, and unequal lengths.
    """
    units = listed("unit", units)
    names = range(len(units)) if groups is None else listed("group", groups)
    if len(names) != len(units):
        raise DataError(f"groups: {len(names)} names for {len(units)} units; give one for each.")
    streaming = StreamingCI()
    for name, unit in zip(names, units, strict=True):
        streaming.add_unit(str(name), unit)
    return streaming.interval(level)


class StreamingCI:
    """The interval, fed one unit at a time. Memory: four integers a group and number of raters."""

    def __init__(self) -> None:
        self.groups: dict[str, IntervalAlpha] = {}

    def add_unit(self, group: str, unit: Sequence[float | None], times: int = 1) -> None:
        """Add a unit of the group called `group`; `times` of -1 takes it back.

        Raises `DataError` on ratings that are no finite numbers.
        """
        held = self.groups.get(group, IntervalAlpha())
        held.add_unit(unit, times)
        self._hold(group, held)

    def merge(self, other: "StreamingCI") -> None:
        """Add all units of another; a group may have units in both."""
        check_kind("what is merged", other, StreamingCI)
        for group, more in other.groups.items():
            held = self.groups.get(group, IntervalAlpha())
            held.merge(more)
            self._hold(group, held)

    def _hold(self, group: str, alpha: IntervalAlpha) -> None:
        if alpha.sums:
            self.groups[group] = alpha
        else:  # dropped, so that equal contents mean equal tables
            self.groups.pop(group, None)

    def interval(self, level: float = 0.95) -> Interval | None:
        """Return the interval over the units held.

        None with fewer than `MIN_GROUPS` groups, where alpha is undefined with or without one of them, and where the
        raters never differ: nothing then says how sure an alpha of 1 is. Raises `DataError` on a `level` not between
        0 and 1.
        """
        if not (isinstance(level, int | float) and 0 < level < 1):
            raise DataError(f"level is {level!r}; give a probability between 0 and 1, .95 say.")
        if len(self.groups) < MIN_GROUPS:
            return None
        whole = IntervalAlpha()
        for group in self.groups.values():
            whole.merge(group)
        found = whole.alpha()
        error = jackknife_error(alphas_without_each(list(self.groups.values())))
        if found.value is None or error is None or not found.observed:
            return None
        reach = student(0.5 + level / 2, len(self.groups) - 1) * error
        return Interval(found.value - reach, min(1.0, found.value + reach), level, len(self.groups))

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as text (msgpack-able)."""
        return {"version": 2, "groups": {group: alpha.state_dict() for group, alpha in self.groups.items()}}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "StreamingCI":
        """Undo `state_dict`. Raises `DataError` on what it never returned."""
        if not isinstance(state, Mapping) or not isinstance(state.get("groups"), Mapping):
            raise DataError(
                f"state of an interval: {state!r:.80} has no table `groups`; give what `state_dict` returned."
            )
        made = cls()
        for group, sums in state["groups"].items():
            made.groups[str(group)] = IntervalAlpha.from_state_dict(sums)
        return made


def alphas_without_each(groups: Sequence[IntervalAlpha]) -> list[float | None]:
    """Return alpha of all groups but the first, all but the second, and so on.

    None where that is undefined.
    """
    common = math.lcm(*(m - 1 for group in groups for m in group.sums))
    sums = [_sums(group, common) for group in groups]
    n, t1, t2, within = (sum(column) for column in zip(*sums, strict=True)) if sums else (0, 0, 0, 0)
    found: list[float | None] = []
    for n_g, t1_g, t2_g, within_g in sums:
        expected = ((n - n_g) * (t2 - t2_g) - (t1 - t1_g) ** 2) * common
        found.append(1 - (n - n_g - 1) * (within - within_g) / expected if expected else None)
    return found


def _sums(alpha: IntervalAlpha, common: int) -> tuple[int, int, int, int]:
    """Return n, T1, T2 and `common` times the sum of N[m] / (m - 1); see `IntervalAlpha`."""
    n = t1 = t2 = within = 0
    for m, (units, s1, s2, squares) in alpha.sums.items():
        n, t1, t2 = n + m * units, t1 + s1, t2 + s2
        within += (m * s2 - squares) * (common // (m - 1))
    return n, t1, t2, within


def jackknife_error(without: Sequence[float | None]) -> float | None:
    """Return the standard error of a statistic, of its values without each of its parts.

    None where one of them is undefined, or there are fewer than two.
    """
    values = [value for value in without if value is not None]
    if len(values) < len(without) or len(values) < 2:
        return None
    n, centre = len(values), math.fsum(values) / len(values)
    return math.sqrt((n - 1) / n * math.fsum((value - centre) ** 2 for value in values))


def student(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t, for 15 degrees of freedom or more to about 1e-4.

    Abramowitz & Stegun 26.7.5.
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))
