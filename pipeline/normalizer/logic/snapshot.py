"""Immutable normalization snapshots.

A snapshot is made from the statistics of closed windows and the configuration; its `normalize` is a pure function of
the given column. The id is a hash of the whole content, so an output stamped with it can be reproduced and two
different snapshots never share one. Snapshots encode with msgspec as they are.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from lachesis.pipeline.common.arguments import number_column
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.estimators.estimator import LIMIT
from lachesis.pipeline.normalizer.logic.accumulator import Moments
from lachesis.pipeline.normalizer.logic.ranks import RankTable

__all__ = ["KeyStats", "NormalizationSnapshot", "NormalizedColumn"]


class KeyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of one key (a reward component or a rater), in units of the raw reward; std is the population's."""

    count: int
    groups: int
    mean: float
    std: float
    low: float
    high: float

    @classmethod
    def of(cls, moments: Moments) -> "KeyStats":
        """Return the statistics that `moments` hold."""
        return cls(
            count=moments.count,
            groups=moments.groups,
            mean=moments.mean,
            std=moments.std,
            low=moments.low,
            high=moments.high,
        )


class NormalizedColumn(msgspec.Struct, frozen=True, kw_only=True):
    """One normalized column. `warmup`: passed unchanged for lack of statistics. `clipped`: how many were moved."""

    values: list[float | None]
    clipped: int
    warmup: bool


class NormalizationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of environment `env` after the windows up to `through` (-1: none)."""

    id: str
    env: str
    through: int
    config: NormalizationConfig
    keys: dict[str, KeyStats]
    ranks: dict[str, RankTable] = {}
    """Of the keys that are normalized to ranks."""
    success: float | None = None
    """The highest success rate up to then, where it is kept; None: not known."""

    @classmethod
    def build(
        cls,
        env: str,
        through: int,
        config: NormalizationConfig,
        keys: dict[str, KeyStats],
        ranks: dict[str, RankTable] | None = None,
        *,
        success: float | None = None,
    ) -> "NormalizationSnapshot":
        """Return the snapshot with its id."""
        more = [*([ranks] if ranks else []), *([{"success": success}] if success is not None else [])]
        bounds = dict(sorted(config.bounds.items()))
        settings = msgspec.Raw(msgspec.json.encode({**msgspec.to_builtins(config), "bounds": bounds}))
        content = msgspec.json.encode((1, env, through, settings, keys, *more), order="deterministic")
        digest = hashlib.blake2b(content, digest_size=12).hexdigest()
        return cls(id=digest, env=env, through=through, config=config, keys=keys, ranks=ranks or {}, success=success)

    def warm(self, key: str) -> bool:
        """Say whether there are enough rewards under `key` to normalize with."""
        stats = self.ranks.get(key) if self.config.ranks(key) else self.keys.get(key)
        if stats is None:
            return False
        return stats.count >= self.config.warmup_samples and stats.groups >= self.config.warmup_groups

    def normalize(self, key: str, column: Sequence[float | None]) -> NormalizedColumn:
        """Normalize one group's values of `key`; None stays None.

        Raises `DataError` on what is no number within +-1e100.
        """
        config, column = self.config, number_column("reward", column, largest=LIMIT)
        if config.mode == "none":
            return NormalizedColumn(values=list(column), clipped=0, warmup=False)
        if config.mode == "minmax" and key in config.bounds:
            low, high = config.bounds[key]
            inside = [None if x is None else min(max(x, low), high) for x in column]
            values = [None if x is None else (x - low) / (high - low) for x in inside]
            return NormalizedColumn(values=values, clipped=_moved(column, inside), warmup=False)
        if not self.warm(key):
            return NormalizedColumn(values=list(column), clipped=0, warmup=True)
        if config.ranks(key):
            table = self.ranks[key]
            return NormalizedColumn(
                values=[None if x is None else table.rank(x) for x in column], clipped=0, warmup=False
            )
        stats = self.keys[key]
        std = max(stats.std, config.std_floor)
        # The clip bounds the distance from the mean in both modes. Clipping x/std itself would pin every reward of an
        # environment whose mean lies more than `clip` deviations from zero, and with it all advantages to 0.
        reach = config.clip * std if config.clip else float("inf")
        inside = [None if x is None else min(max(x, stats.mean - reach), stats.mean + reach) for x in column]
        centre = stats.mean if config.mode == "zscore" else 0.0
        values = [None if x is None else (x - centre) / std for x in inside]
        return NormalizedColumn(values=values, clipped=_moved(column, inside), warmup=False)


def _moved(before: Sequence[float | None], after: Sequence[float | None]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))
