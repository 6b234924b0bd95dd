"""Statistics of the checks: correlation, Fisher's z, the t of a slope, Mann and Whitney's U.

Pure functions.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean

__all__ = ["correlation", "fisher_z", "longer_share", "slope_t"]

_MAX_ABS_VALUE = 1e6


def correlation(xy: float, xx: float, yy: float) -> float | None:
    """Return r from centred sums of products, None where one of the two does not vary."""
    return None if xx <= 1e-12 or yy <= 1e-12 else max(-1.0, min(1.0, xy / math.sqrt(xx * yy)))


def fisher_z(r: float, degrees: float) -> float:
    """Return atanh(r) sqrt(degrees - 2), near standard normal where there is no correlation.

    `degrees`: n - 1.
    """
    return math.atanh(max(-0.999999, min(0.999999, r))) * math.sqrt(max(0.0, degrees - 2))


def slope_t(values: Sequence[float]) -> float | None:
    """Return the t statistic of the least-squares slope of `values` over 0, 1, ....

    None for fewer than 3, or flat.
    """
    n = len(values)
    if n < 3:
        return None
    x, y = (n - 1) / 2, fmean(values)
    xy = sum((i - x) * (value - y) for i, value in enumerate(values))
    r = correlation(xy, n * (n * n - 1) / 12, sum((value - y) ** 2 for value in values))
    if r is None:
        return None
    left = 1 - r * r
    return math.copysign(_MAX_ABS_VALUE, r) if left < 1e-12 else r * math.sqrt((n - 2) / left)


def longer_share(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return how often a value of `one` exceeds one of `other`, and z. Ties count half.

    Both are sorted and not empty.

    U / (n m) with the normal approximation of its distribution where there is no difference. That ties make it narrower
    is left out, which errs on the side of chance.
    """
    n, m = len(one), len(other)
    u = math.fsum((bisect_left(other, value) + bisect_right(other, value)) / 2 for value in one)
    return u / (n * m), (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
