"""Immutable normalization snapshots.

A snapshot is made from the statistics of closed windows and the configuration; its `normalize` is a pure function of
the given column. The id is a hash of the whole content, so an output stamped with it can be reproduced and two
different snapshots never share one. Snapshots encode with msgspec as they are.
"""

import hashlib
from collections.abc import Sequence

import msgspec

from lachesis.pipeline.common.number_arguments import number_column
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.estimators.estimator import LIMIT
from lachesis.pipeline.normalizer.logic.accumulator import Moments
from lachesis.pipeline.normalizer.logic.ranks import RankTable

__all__ = ["NormalizationSnapshot"]


class NormalizationSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of environment `env` after the windows up to `through` (-1: none)."""

    id: str
    env: str
    through: int
    config: NormalizationConfig
    keys: dict[str, Moments]
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
        keys: dict[str, Moments],
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

    def normalize(self, key: str, column: Sequence[float | None]) -> list[float | None]:
        """Return one group's normalized values of `key`; None stays None.

        Unless the key is `warm`, they are unchanged.

        Raises `DataError` on what is no number within +-1e100.
        """
        config, column = self.config, number_column("reward", column, largest=LIMIT)
        if config.mode == "minmax" and key in config.bounds:
            low, high = config.bounds[key]
            return [None if x is None else (min(max(x, low), high) - low) / (high - low) for x in column]
        if config.mode == "none" or not self.warm(key):
            return list(column)
        if config.ranks(key):
            table = self.ranks[key]
            return [None if x is None else table.rank(x) for x in column]
        stats = self.keys[key]
        std = max(stats.std, config.std_floor)
        # The clip bounds the distance from the mean in both modes. Clipping x/std itself would pin every reward of an
        # environment whose mean lies more than `clip` deviations from zero, and with it all advantages to 0.
        reach = config.clip * std if config.clip else float("inf")
        low, high = stats.mean - reach, stats.mean + reach
        centre = stats.mean if config.mode == "zscore" else 0.0
        return [None if x is None else (min(max(x, low), high) - centre) / std for x in column]
