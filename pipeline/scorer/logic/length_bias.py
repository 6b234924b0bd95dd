"""Measures whether raters rate longer answers higher, at equal ratings by the other raters. Pure.

Within each group, ratings, lengths and the median ratings of the other raters are centred; their products are summed
over groups. The bias is the partial correlation of rating and length given that median, which one biased rater among
three others does not move far; of two raters each is measured by the other. It is the plain correlation where there are
no others, or where they rate all answers of a group alike. Sums of two halves of a log can be added.
"""

import math
from collections.abc import Mapping, Sequence
from operator import mul
from statistics import fmean, median

from lachesis.schemas.annotations import GroupScore

__all__ = ["LengthBias"]

MIN_GROUPS = 8
"""Groups in which a rater's ratings and the lengths differ, without which nothing is said."""
_ROUNDING = 1e-9
_NOTHING = (0.0,) * 7


class LengthBias:
    """Sums over groups."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}
        """By rater: groups, and the sums of xx, yy, zz, xy, xz and yz for x rating, y length, z others."""

    def add_group(self, group: GroupScore) -> None:
        """Take in a scored group."""
        if not group.lengths:
            return
        for rater, ratings in group.ratings.items():
            others = [column for name, column in group.ratings.items() if name != rater]
            sums = _products(ratings, group.lengths, others)
            if sums is not None:
                known = self.sums.get(rater, _NOTHING)
                self.sums[rater] = [a + b for a, b in zip(known, sums, strict=True)]

    def merged(self, other: "LengthBias") -> Mapping[str, float]:
        """Return the bias of each rater over both, -1 to 1; a rater whose bias is not known is left out."""
        found = {}
        for rater in {**self.sums, **other.sums}:
            parts = [one.sums.get(rater, _NOTHING) for one in (self, other)]
            bias = _partial([a + b for a, b in zip(*parts, strict=True)])
            if bias is not None:
                found[rater] = bias
        return found

    @classmethod
    def of(cls, groups: Sequence[GroupScore]) -> Mapping[str, float]:
        """Return the bias of each rater over `groups`."""
        whole = cls()
        for group in groups:
            whole.add_group(group)
        return whole.merged(cls())


def _products(
    ratings: Sequence[float | None], lengths: Sequence[int], others: Sequence[Sequence[float | None]]
) -> list[float] | None:
    """Return what a group adds to the sums; None where ratings or lengths do not differ."""
    rows = []
    for place, (rating, length) in enumerate(zip(ratings, lengths, strict=True)):
        known = [value for column in others if (value := column[place]) is not None]
        if rating is not None and (known or not others):
            rows.append((rating, float(length), median(known) if known else 0.0))
    if len(rows) < 2:
        return None
    x, y, z = (_centred(column) for column in zip(*rows, strict=True))
    if not any(x) or not any(y):
        return None
    return [1.0, *(math.fsum(map(mul, a, b)) for a, b in ((x, x), (y, y), (z, z), (x, y), (x, z), (y, z)))]


def _centred(column: Sequence[float]) -> list[float]:
    mean = fmean(column)
    if max(column) - min(column) <= _ROUNDING * max(map(abs, column)):
        return [0.0] * len(column)
    return [value - mean for value in column]


def _partial(sums: Sequence[float]) -> float | None:
    """Return the partial correlation of rating and length given the others."""
    groups, xx, yy, zz, xy, xz, yz = sums
    if groups < MIN_GROUPS:
        return None
    if zz:
        left_x, left_y, both = xx - xz * xz / zz, yy - yz * yz / zz, xy - xz * yz / zz
        if left_x <= _ROUNDING * xx or left_y <= _ROUNDING * yy:
            return None  # the others say all that this rater, or the length, says
    else:
        left_x, left_y, both = xx, yy, xy
    return max(-1.0, min(1.0, both / math.sqrt(left_x * left_y)))
