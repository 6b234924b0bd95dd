"""The settings of the normalizer: all that it takes of a run's configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.logic.reward import RewardRule
from lachesis.schemas.promotion import Promotion

__all__ = ["EnvRewardSettings", "NormalizerSettings"]


class EnvRewardSettings(NamedTuple):
    """How the scores of an environment become advantages. `reliability`: raters are weighed by their reliability."""

    normalization: NormalizationConfig
    shaping: RewardConfig
    advantage: AdvantageConfig
    reliability: bool = False

    def rule(self) -> RewardRule:
        """Return the rule. Raises `ConfigError` where an estimator of a user's own cannot be loaded."""
        return RewardRule(self.advantage, self.shaping, reliability=self.reliability)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormalizerSettings:
    """`lost_deadline_s`: seconds after which scores that join no rollout are given up.

    `promoted` returns the environments under a promotion. It raises `ConfigError` if the promotion does not fit the
    run's configuration.
    """

    environments: Mapping[str, EnvRewardSettings]
    lost_deadline_s: float
    promoted: Callable[[Promotion], Mapping[str, EnvRewardSettings]]
