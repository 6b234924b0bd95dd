"""The mean of numbers that may be as large as numbers are."""

import math
from collections.abc import Sequence

__all__ = ["finite_mean"]


def finite_mean(values: Sequence[float]) -> float | None:
    """Return the mean, which is finite if all values are, even if their sum is not; None without any."""
    if not values:
        return None
    mean = sum(values) / len(values)
    if math.isfinite(mean):
        return mean
    largest = max(map(abs, values))
    return largest * (math.fsum(value / largest for value in values) / len(values))
