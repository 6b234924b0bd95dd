"""Statistics of the checks: correlations, the t of a slope, Mann and Whitney's U.

Pure functions. None depends on a unit: multiplying all values by a number, or adding one, changes nothing.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean

__all__ = ["correlation", "longer_share", "rank_correlation", "scaled_deviations", "slope_t", "student_z"]

_MAX_ABS_T = 1e6
_ROUNDING = 1e-12
"""Differences of a smaller share of the largest magnitude come from rounding."""


def correlation(xy: float, xx: float, yy: float) -> float | None:
    """Return r from centred sums of products, None where one of the two does not vary."""
    if xx <= 0 or yy <= 0:
        return None
    product = xx * yy
    # the root of the product is exact for equal columns; where the product leaves the range of floats, the roots do not
    scale = math.sqrt(product) if 0 < product < math.inf else math.sqrt(xx) * math.sqrt(yy)
    return max(-1.0, min(1.0, xy / scale))


def scaled_deviations(values: Sequence[float]) -> list[float]:
    """Return the deviations from the mean over the largest of them.

    Zeros if values differ by rounding alone.
    """
    most = max(map(abs, values), default=0.0)
    if not most:
        return [0.0] * len(values)
    unit = [value / most for value in values]
    centre = fmean(unit)
    reach = max(abs(value - centre) for value in unit)
    return [(value - centre) / reach if reach > _ROUNDING else 0.0 for value in unit]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rho, ties at their mean rank.

    None below two values or where one of the two does not vary.
    """
    x, y = _centred_ranks(one), _centred_ranks(other)
    return correlation(
        math.fsum(a * b for a, b in zip(x, y, strict=True)), math.fsum(a * a for a in x), math.fsum(b * b for b in y)
    )


def _centred_ranks(values: Sequence[float]) -> list[float]:
    ranked, n = sorted(values), len(values)
    return [bisect_left(ranked, value) + bisect_right(ranked, value) - n for value in values]


def student_z(t: float, degrees: float) -> float:
    """Return the standard normal deviate that is as rare as `t` is with so many degrees of freedom.

    To about .02 up to z = 4 (Wallace 1959).
    """
    scale = (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(scale * math.sqrt(degrees * math.log1p(min(abs(t), _MAX_ABS_T) ** 2 / degrees)), t)


def slope_t(values: Sequence[float]) -> float | None:
    """Return the t statistic of the least-squares slope of `values` over 0, 1, ....

    None for fewer than 3, or flat.
    """
    n = len(values)
    if n < 3:
        return None
    y, middle = scaled_deviations(values), (n - 1) / 2
    xy = math.fsum((i - middle) * value for i, value in enumerate(y))
    r = correlation(xy, n * (n * n - 1) / 12, math.fsum(value * value for value in y))
    if r is None:
        return None
    left = 1 - r * r
    return math.copysign(_MAX_ABS_T, r) if left < 1e-12 else r * math.sqrt((n - 2) / left)


def longer_share(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return how often a value of `one` exceeds one of `other`, and z. Ties count half.

    Both are sorted and not empty.

    U / (n m) with the normal approximation of its distribution where there is no difference. That ties make it narrower
    is left out, which errs on the side of chance.
    """
    n, m = len(one), len(other)
    u = math.fsum((bisect_left(other, value) + bisect_right(other, value)) / 2 for value in one)
    return u / (n * m), (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
