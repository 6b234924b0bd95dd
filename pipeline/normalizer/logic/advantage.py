"""Advantages of one complete group, by the configured estimator. Pure."""

from collections.abc import Mapping, Sequence

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.estimator import GroupAdvantage
from lachesis.pipeline.normalizer.estimators.loader import load_estimator

__all__ = ["group_advantage"]


def group_advantage(
    rewards: Sequence[float | None],
    config: AdvantageConfig,
    lengths: Sequence[int] | None = None,
    ratings: Mapping[str, Sequence[float | None]] | None = None,
) -> GroupAdvantage:
    """Return the advantages of one group; see `Estimator.advantages`."""
    return load_estimator(config).advantages(rewards, lengths, ratings)
