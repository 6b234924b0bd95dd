"""The familiar running normalizer, for people who move over: update first, then normalize with the current batch in.

In: batches of rewards in arrival order. Out: normalized rewards. It depends on that order, so replicas cannot agree and
a replay needs the same arrivals; the pipeline's own stage uses the windows of `logic` instead. Updating first also
bounds |z| by sqrt(n-1), and a single extreme reward stays in minimum and maximum for ever. It is offered because it
reproduces existing runs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["RewardNormalizer", "WelfordAccumulator"]


class WelfordAccumulator:
    """Running mean and population variance after Welford (1962), with minimum and maximum."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.m2 = 0.0
        self.min_val = math.inf
        self.max_val = -math.inf

    def update(self, value: float) -> None:
        """Add one value."""
        self.count += 1
        delta = value - self.mean
        self.mean += delta / self.count
        self.m2 += delta * (value - self.mean)
        self.min_val = min(self.min_val, value)
        self.max_val = max(self.max_val, value)

    def update_batch(self, values: Iterable[float]) -> None:
        """Add values in their order."""
        for value in values:
            self.update(value)

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self.m2 / self.count if self.count > 1 else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.variance)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        for name in vars(self):
            setattr(self, name, state[name])


class RewardNormalizer:
    """Update-then-normalize over one shared statistic.

    `warmup` counts samples, the current batch included; before that rewards pass unchanged. A standard deviation below
    `eps` gives zeros, a range below it 0.5. `clip` of None, 0 or less is off. Raises ConfigError on an unknown mode.
    """

    def __init__(
        self,
        mode: Literal["zscore", "minmax", "none"] = "zscore",
        clip: float | None = 5.0,
        warmup: int = 10,
        eps: float = 1e-8,
    ) -> None:
        if mode not in ("zscore", "minmax", "none"):
            raise ConfigError(f"Invalid normalization mode {mode!r}; choose zscore, minmax or none.")
        self.mode = mode
        self.clip = clip if clip is not None and clip > 0 else None
        self.warmup = warmup
        self.eps = eps
        self.stats = WelfordAccumulator()

    @property
    def is_warmed_up(self) -> bool:
        """Whether `warmup` samples were seen."""
        return self.stats.count >= self.warmup

    def normalize(self, rewards: Sequence[float]) -> list[float]:
        """Add `rewards` to the statistics and return them normalized. Raises DataError on NaN or infinity."""
        for i, value in enumerate(rewards):
            if not math.isfinite(value):
                raise DataError(f"reward {i} is {value}; a missing reward is left out, never NaN.")
        if self.mode == "none" or not rewards:
            return list(rewards)
        self.stats.update_batch(rewards)
        if not self.is_warmed_up:
            return list(rewards)
        if self.mode == "zscore":
            mean, std = self.stats.mean, self.stats.std
            scaled = [(value - mean) / std if std >= self.eps else 0.0 for value in rewards]
        else:
            low, extent = self.stats.min_val, self.stats.max_val - self.stats.min_val
            scaled = [(value - low) / extent if extent >= self.eps else 0.5 for value in rewards]
        if self.clip is None:
            return scaled
        return [min(max(value, -self.clip), self.clip) for value in scaled]

    def metrics(self) -> dict[str, float]:
        """Return `reward_norm/{count,mean,std,min,max}`; minimum and maximum are 0 before the first reward."""
        stats = self.stats
        low, high = (stats.min_val, stats.max_val) if stats.count else (0.0, 0.0)
        values = {"count": stats.count, "mean": stats.mean, "std": stats.std, "min": low, "max": high}
        return {f"reward_norm/{name}": value for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return settings and statistics."""
        settings = {"mode": self.mode, "clip": self.clip, "warmup": self.warmup, "eps": self.eps}
        return {**settings, "stats": self.stats.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over settings and statistics."""
        self.mode, self.clip, self.warmup, self.eps = (state[name] for name in ("mode", "clip", "warmup", "eps"))
        self.stats.load_state_dict(state["stats"])
