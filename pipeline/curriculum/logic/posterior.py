"""Integrates the posterior of an item's difficulty: a normal prior, results at known abilities.

The density is N(D; mean, deviation^2) sigmoid(a - D)^s sigmoid(D - b)^f. Its logarithm is concave, and at least as
curved as the prior's: it lies within a few prior deviations of its mode. Float64 throughout; the same everywhere.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.logic.strategy import finite_sigmoid

__all__ = ["Evidence", "Posterior", "integrate"]

_REACH = 9.0
"""Prior deviations from the mode: beyond, the density is below e^-34 of the mode's even without a result."""
_PARTS = np.linspace(0.0, 1.0, 129)
"""The grid, as parts of the interval that is looked at."""
_FILLED = 43
"""Points of the grid that the density must cover; a narrower one is looked at more closely."""
_CLOSE_LOGITS = 1e-13
_BISECTIONS = 100
"""Steps to find the mode to `_CLOSE_LOGITS`, or as close as float64 allows."""
_NEGLIGIBLE_LOG = -34.0
"""Log density below the highest from where on it is left out: 2e-15."""


class Evidence(NamedTuple):
    """The results of one item: how many samples passed and failed, and the mean ability (logits) of each kind."""

    passes: float
    passes_ability: float
    failures: float
    failures_ability: float

    def scaled(self, factor: float) -> "Evidence":
        """Let the results count `factor` times as much."""
        return Evidence(self.passes * factor, self.passes_ability, self.failures * factor, self.failures_ability)

    def merged(self, other: "Evidence") -> "Evidence":
        """Add other results of the item; means of abilities stand for the single ones from then on."""
        return Evidence(
            *_mean_of(self.passes, self.passes_ability, other.passes, other.passes_ability),
            *_mean_of(self.failures, self.failures_ability, other.failures, other.failures_ability),
        )


class Posterior(NamedTuple):
    """The most likely difficulty, the inverse of the curvature there, which is the variance of the normal density that
    fits the posterior best at its mode, and the log likelihood of the evidence under the prior.
    """

    mode: float
    variance: float
    log_evidence: float


def integrate(mean: float, deviation: float, *evidence: Evidence) -> Posterior:
    """Return the posterior under a prior of this mean and standard deviation, in logits."""
    results = [one for one in evidence if one.passes + one.failures > 0]
    if not results:
        return Posterior(mean, deviation**2, 0.0)

    def log_density(x: NDArray[np.float64]) -> NDArray[np.float64]:
        density: NDArray[np.float64] = -0.5 * ((x - mean) / deviation) ** 2
        for one in results:
            density -= one.passes * np.logaddexp(0.0, x - one.passes_ability)
            density -= one.failures * np.logaddexp(0.0, one.failures_ability - x)
        return density

    mode = _find_mode(mean, deviation, results)
    low, high = mode - _REACH * deviation, mode + _REACH * deviation
    while True:
        x = low + (high - low) * _PARTS
        log = log_density(x)
        top = float(log.max())
        (inside,) = np.nonzero(log > top + _NEGLIGIBLE_LOG)
        if len(inside) >= _FILLED:
            break
        next_low, next_high = float(x[max(inside[0] - 1, 0)]), float(x[min(inside[-1] + 1, len(x) - 1)])
        if next_high - next_low <= 1e-12 * max(abs(next_low), abs(next_high), 1.0):
            break  # as close as float64 allows
        low, high = next_low, next_high
    step = (high - low) / (len(x) - 1)
    integral = float(np.exp(log - top).sum()) * step / (deviation * math.sqrt(2.0 * math.pi))
    return Posterior(mode, 1.0 / _curvature(mode, deviation, results), top + math.log(integral))


def _mean_of(weight: float, mean: float, more: float, value: float) -> tuple[float, float]:
    total = weight + more
    return (total, mean + (value - mean) * (more / total)) if total > 0 else (0.0, 0.0)


def _find_mode(mean: float, deviation: float, evidence: Sequence[Evidence]) -> float:
    """Return where the posterior density is highest: the root of a decreasing function, by bisection."""
    low = mean - deviation**2 * sum(one.passes for one in evidence)
    high = mean + deviation**2 * sum(one.failures for one in evidence)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        if high - low < _CLOSE_LOGITS:
            break
        slope = (mean - middle) / deviation**2
        for one in evidence:
            slope += one.failures * finite_sigmoid(one.failures_ability - middle)
            slope -= one.passes * finite_sigmoid(middle - one.passes_ability)
        if slope > 0:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def _curvature(x: float, deviation: float, evidence: Sequence[Evidence]) -> float:
    """Return the second derivative of the negative log density at x."""
    curvature = 1.0 / deviation**2
    for one in evidence:
        for count, ability in ((one.passes, one.passes_ability), (one.failures, one.failures_ability)):
            p = finite_sigmoid(ability - x)
            curvature += count * p * (1.0 - p)
    return curvature
