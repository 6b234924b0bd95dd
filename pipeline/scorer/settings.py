"""The settings of the scorer: all that it takes of a run's configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lachesis.pipeline.common.trainability import TrainerReads
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas.promotion import Promotion

__all__ = ["EnvScoringSettings", "ScorerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvScoringSettings:
    """How the groups of an environment are scored.

    `success_rater`: the rater that decides whether a sample succeeded, by a rating from `success_threshold` on; None:
    the score decides. `weighted`: raters that advantages need.
    """

    scoring: ScoringConfig
    shaping: RewardConfig
    success_rater: str | None = None
    success_threshold: float = 1.0
    weighted: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """`scoring`: the run's. `named`: all raters that the configuration names, which alone a promotion may bring in.

    `reads`: what the run's trainer reads beside text tokens, None if another trains. `excerpts`: whether scores carry
    how texts begin and end, for the health checks. `promoted` returns the environments under a promotion, with the
    raters as the promotion names them. It raises `ConfigError` if the promotion does not fit the run's configuration.
    """

    scoring: ScoringConfig
    environments: Mapping[str, EnvScoringSettings]
    named: Sequence[RaterConfig]
    reads: TrainerReads | None
    excerpts: bool
    promoted: Callable[[Promotion], Mapping[str, EnvScoringSettings]]
