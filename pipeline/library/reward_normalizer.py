"""A running reward normalizer: update the statistics first, then normalize with them.

It normalizes batches of rewards in arrival order. The result depends on that order, so replicas cannot agree and a
replay needs the same arrivals; the pipeline's own stage uses the windows of `logic` instead. Updating first also bounds
|z| by sqrt(n-1), and a single extreme reward stays in minimum and maximum for ever. It exists to reproduce existing
runs and to continue from their checkpoints.
"""

import math
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from lachesis.pipeline.common.number_arguments import number_column, setting_number
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["RewardNormalizer", "WelfordAccumulator"]

MAX_ABS_REWARD = 1e100
"""Largest magnitude of a reward whose square, times all rewards there are, is still a number."""


class WelfordAccumulator:
    """Running mean and population variance after Welford (1962), with minimum and maximum.

    Values lie within +-1e100, so that their squares, and the sums of those, are numbers: one that does not is refused
    and changes nothing. Tested with offsets up to 1e9 and magnitudes from 1e-100 to 1e100.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0
        """Sum of squared deviations from the mean."""
        self._min = math.inf
        self._max = -math.inf

    def update(self, value: float) -> None:
        """Add one value. Raises `DataError` on what is no number within +-1e100."""
        self._add(*_numbers("value", [value]))

    def _add(self, value: float) -> None:
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)
        self._min = min(self._min, value)
        self._max = max(self._max, value)

    def update_batch(self, values: Iterable[float]) -> None:
        """Add values in their order. Raises `DataError`, and adds none, on what is no number within +-1e100."""
        for value in _numbers("value", values):
            self._add(value)

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.m2 / self.count if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 0 for fewer than two values."""
        return math.sqrt(self.variance)

    @property
    def min_val(self) -> float:
        """Least value; 0 before the first."""
        return self._min if self.count else 0.0

    @property
    def max_val(self) -> float:
        """Largest value; 0 before the first."""
        return self._max if self.count else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return count, mean, m2, min and max; before the first value min is inf and max -inf."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2, "min": self._min, "max": self._max}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the statistics by what `state_dict` returned.

        Raises `DataError`, and changes nothing, when an entry is missing or is no statistic of finite values.
        """
        count, mean, m2, low, high = _entries("accumulator", state, ("count", "mean", "m2", "min", "max"))
        if not (isinstance(count, int) or (isinstance(count, float) and count.is_integer())) or count < 0:
            raise DataError(f"accumulator.count is {count!r:.80}; give the number of values, 0 or more.")
        # Strict JSON has no infinity: an empty state may come back with null for minimum and maximum
        seen = [mean, low, high] if count else [mean]
        seen = _numbers("accumulator's mean, min and max,", seen)
        (squares,) = _numbers("accumulator's m2,", [m2], largest=sys.float_info.max)
        if squares < 0 or (count and not seen[1] <= seen[2]):
            raise DataError(f"accumulator has m2 {squares}, min {low!r:.40} and max {high!r:.40}: those of no values.")
        self.count, self.mean, self.m2 = int(count), seen[0], squares
        self._min, self._max = (seen[1], seen[2]) if count else (math.inf, -math.inf)


class RewardNormalizer:
    """Update-then-normalize over one shared statistic.

    zscore: (x - mean) / (std + eps), zeros where std < eps. minmax: (x - min) / (max - min + eps), 0.5 where the range
    is below eps. none: rewards as they are, unseen by the statistics. Afterwards values are clipped to [-clip, clip];
    None, 0 or less turns the clip off. Until `warmup` rewards were seen, the current batch included, rewards are only
    clipped. Rewards lie within +-1e100. Raises `ConfigError` (a `ValueError`) on an unknown mode, and on a clip, a
    warm-up or an eps that is none.
    """

    VALID_MODES: ClassVar[frozenset[str]] = frozenset({"zscore", "minmax", "none"})

    def __init__(self, mode: str = "zscore", clip: float | None = 5.0, warmup: int = 10, eps: float = 1e-8) -> None:
        self._configure(mode, clip, warmup, eps)
        self._accumulator = WelfordAccumulator()

    def _configure(self, mode: str, clip: float | None, warmup: int, eps: float) -> None:
        if not isinstance(mode, str) or mode not in self.VALID_MODES:
            raise ConfigError(f"Invalid normalization mode {mode!r}; choose zscore, minmax or none.")
        clip, eps = None if clip is None else setting_number("clip", clip), setting_number("eps", eps)
        if eps < 0:
            raise ConfigError(f"eps is {eps}; give a number of 0 or more.")
        try:
            warmup = operator.index(warmup)
        except TypeError as error:
            raise ConfigError(f"warmup is {warmup!r:.80}; give a number of rewards.") from error
        self.mode = mode
        self.clip = clip if clip is not None and clip > 0 else None
        self.warmup = max(0, warmup)
        self.eps = eps

    @property
    def count(self) -> int:
        """Rewards seen."""
        return self._accumulator.count

    @property
    def mean(self) -> float:
        """Mean of the rewards seen; 0 before the first."""
        return self._accumulator.mean

    @property
    def std(self) -> float:
        """Population standard deviation of the rewards seen; 0 for fewer than two."""
        return self._accumulator.std

    @property
    def is_warmed_up(self) -> bool:
        """Whether `warmup` rewards were seen."""
        return self.count >= self.warmup

    def normalize(self, scores: Iterable[float]) -> list[float]:
        """Add `scores` to the statistics and return them normalized.

        Raises `DataError`, and adds none, on NaN, infinity, a missing one or what is no number within +-1e100.
        """
        values = _numbers("reward", scores)
        if self.mode == "none":
            return values
        self._accumulator.update_batch(values)
        if self.is_warmed_up:
            values = self._zscore(values) if self.mode == "zscore" else self._minmax(values)
        if self.clip is None:
            return values
        return [min(max(value, -self.clip), self.clip) for value in values]

    def _zscore(self, values: list[float]) -> list[float]:
        mean, std = self.mean, self.std
        return [(value - mean) / (std + self.eps) if std >= self.eps else 0.0 for value in values]

    def _minmax(self, values: list[float]) -> list[float]:
        low = self._accumulator.min_val
        extent = self._accumulator.max_val - low
        return [(value - low) / (extent + self.eps) if extent >= self.eps else 0.5 for value in values]

    def metrics_dict(self) -> dict[str, float]:
        """Return `reward_norm/{count,mean,std,min,max}`; minimum and maximum are 0 before the first reward."""
        seen = self._accumulator
        return {
            "reward_norm/count": float(seen.count),
            "reward_norm/mean": seen.mean,
            "reward_norm/std": seen.std,
            "reward_norm/min": seen.min_val,
            "reward_norm/max": seen.max_val,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return settings and statistics: mode, clip, warmup, eps and accumulator."""
        settings = {"mode": self.mode, "clip": self.clip, "warmup": self.warmup, "eps": self.eps}
        return {**settings, "accumulator": self._accumulator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace settings and statistics by what `state_dict` returned, here or elsewhere.

        Raises `DataError` when an entry is missing or is no statistic, and `ConfigError` on settings that are none.
        Then nothing has changed.
        """
        accumulator = WelfordAccumulator()
        accumulator.load_state_dict(_accumulator_state(state))
        self._configure(*_entries("state", state, ("mode", "clip", "warmup", "eps")))
        self._accumulator = accumulator


def _numbers(what: str, values: Iterable[float], *, largest: float = MAX_ABS_REWARD) -> list[float]:
    """Return the numbers. Raises `DataError` on a missing one, too."""
    found = number_column(what, values, largest=largest)
    if None in found:
        raise DataError(f"{what} {found.index(None)} is None; leave out what is missing.")
    return [one for one in found if one is not None]


def _accumulator_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the statistics of a checkpoint; Lachesis 0.1 called them `stats`, with `min_val` and `max_val`."""
    if isinstance(state, Mapping) and "stats" in state and "accumulator" not in state:
        names = ("count", "mean", "m2", "min_val", "max_val")
        return dict(zip(("count", "mean", "m2", "min", "max"), _entries("stats", state["stats"], names), strict=True))
    found: Mapping[str, Any] = _entries("state", state, ("accumulator",))[0]
    return found


def _entries(what: str, state: object, names: Sequence[str]) -> list[Any]:
    """Return the entries of a saved state. Raises `DataError` where one is missing."""
    if not isinstance(state, Mapping):
        raise DataError(f"{what} is {state!r:.80}; give the table that `state_dict` returned.")
    missing = [name for name in names if name not in state]
    if missing:
        raise DataError(f"{what} has no {', '.join(missing)}; give what `state_dict` returned.")
    return [state[name] for name in names]
