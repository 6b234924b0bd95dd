"""Configuration of reward normalization, one per environment."""

from typing import Literal

from msgspec import Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.schemas.errors import ConfigError

__all__ = ["NormalizationConfig"]


class NormalizationConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How raw rewards become normalized ones. Part of every snapshot, so changing a field changes snapshot ids."""

    mode: Literal["scale", "zscore", "minmax", "rank", "none"] = "scale"
    """scale: divide by the standard deviation, keep the centre (a group baseline removes it anyway). zscore: subtract
    the mean as well. minmax: map the declared `bounds` to [0, 1]. rank: the share of earlier rewards below it, half of
    its equals included, so that neither scale nor outliers matter. none: leave as is."""
    window: int = 64
    """Width of a window, in groups of the environment. Groups of window k are normalized with what was known after
    window k-2, so this is also the delay of the statistics. Default 64."""
    decay: float = 0.99
    """Weight of a window relative to the one after it, in (0, 1]. Default 0.99."""
    history: int = 256
    """Windows that a snapshot reaches back; older ones are forgotten. Default 256."""
    warmup_samples: int = 64
    """Rewards that must be in a snapshot before it normalizes; until then rewards pass unchanged. Default 64."""
    warmup_groups: int = 8
    """Groups that must be in a snapshot before it normalizes. Default 8."""
    std_floor: float = 1e-3
    """Smallest divisor, in units of the reward. Default 0.001."""
    clip: float | None = 5.0
    """Largest distance from the mean, in standard deviations; farther rewards are moved to it. None or 0
    turns it off. Default 5."""
    bounds: dict[str, tuple[float, float]] = {}
    """For mode "minmax": (lowest, highest) possible reward per key; a key without is ranked instead. What was observed
    is no bound: one outlier would press all others together for good."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("window", "history"):
            if getattr(self, name) < 1:
                raise ConfigError(f"normalization.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("warmup_samples", "warmup_groups"):
            if getattr(self, name) < 0:
                raise ConfigError(f"normalization.{name} is {getattr(self, name)}; it cannot be negative.")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"normalization.decay is {self.decay}; it must be above 0 and at most 1.")
        if not 0 < self.std_floor < float("inf"):
            raise ConfigError(f"normalization.std_floor is {self.std_floor}; it must be positive and finite.")
        if self.clip is not None and not 0 <= self.clip < float("inf"):
            raise ConfigError(f"normalization.clip is {self.clip}; give a positive number, or 0 to turn it off.")
        if self.bounds and self.mode != "minmax":
            raise ConfigError(f'normalization.bounds is for mode "minmax", not "{self.mode}".')
        for key, (low, high) in self.bounds.items():
            if not low < high or high - low == float("inf"):
                raise ConfigError(f"normalization.bounds.{key} is [{low}, {high}]; give finite numbers, low < high.")

    def ranks(self, key: str) -> bool:
        """Say whether rewards under `key` are normalized to ranks."""
        return not key.startswith(".") and (self.mode == "rank" or (self.mode == "minmax" and key not in self.bounds))
