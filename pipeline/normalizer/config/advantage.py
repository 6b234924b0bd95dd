"""Configuration of advantages."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import CodeParams, CodePath
from lachesis.pipeline.normalizer.known_estimators import ESTIMATORS, estimator_names
from lachesis.schemas.errors import ConfigError

__all__ = ["SHAPEABLE", "AdvantageConfig"]

SHAPEABLE = ("centred", "dr_grpo", "rloo", "opo", "grpo")
"""Estimators that shaping goes with; the others divide by what bonuses are part of, or whiten over the batch."""


class AdvantageConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the rewards of a group become advantages."""

    estimator: CodePath = "centred"
    """With mean mu and sample standard deviation s of the group's n valid rewards: centred: r - mu. grpo: (r - mu) / s.
    dr_grpo: r - mu, for a loss with constant-length aggregation. rloo: n/(n-1) (r - mu). maxrl: (r - mu) / mu, for
    rewards >= 0. opo: r minus the length-weighted mean. reinforce++-baseline: r - mu, whitened over the batch: the
    ledger has it less the batch's mean and divided by its standard deviation, each sample weighted by its tokens. gdpo:
    the sum of grpo of each rater's ratings, times `weights`, whitened in the same way; a sample needs all of them.
    pass@k: the best sample alone gets its lead over the second, / s. Or your own: `module:name` or
    `path/to/file.py:name`, a function of a `lachesis.RewardGroup`."""
    std_floor: float = 1e-3
    """Smallest divisor where an estimator divides by s, in units of the reward. Default 0.001."""
    weights: dict[str, float] = {}
    """For gdpo: weight of each rater's ratings, by its name; one that is not named is left out. Default empty: every
    rater weighs 1."""
    params: CodeParams | UnsetType = UNSET
    """Keyword arguments of an estimator of your own. Default none."""
    turn_discount: float = 1.0
    """Weight of a turn's reward for each turn before it, relative to the turn after that: 0 credits each turn with its
    own reward alone, 1 with all later ones as well, the mean of them where the conversation has branches. For
    environments that give rewards of turns, which go with the estimators centred, dr_grpo and rloo; the formula is in
    `normalizer/logic/turns.py`. Default 1."""
    promotable: list[CodePath] = []
    """Estimators of your own, in addition to `estimator`, that a promotion may bring in: a promotion is a message, and
    may name no other code. The parameters that come with it may be numbers and switches. Default none."""

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.estimator not in ESTIMATORS and ":" not in self.estimator and self.estimator not in estimator_names():
            raise ConfigError(
                f"advantage.estimator {self.estimator!r} is neither module:name nor path/to/file.py:name nor a "
                f"built-in one{nearest(self.estimator, estimator_names())}"
            )
        if self.own_params and self.estimator in ESTIMATORS:
            raise ConfigError(f"advantage.params is for an estimator of your own, not {self.estimator}.")
        if not 0 < self.std_floor < float("inf"):
            raise ConfigError(f"advantage.std_floor is {self.std_floor}; it must be positive and finite.")
        if not 0 <= self.turn_discount <= 1:
            raise ConfigError(f"advantage.turn_discount is {self.turn_discount}; it must be between 0 and 1.")
        for name, weight in self.weights.items():
            if not 0 < weight < float("inf"):
                raise ConfigError(f"advantage.weights.{name} is {weight}; it must be positive. Leave it out instead.")
        if self.weights and self.estimator != "gdpo":
            raise ConfigError(f"advantage.weights is for estimator gdpo, not {self.estimator}.")

    @property
    def own_params(self) -> dict[str, Any]:
        """The keyword arguments of an estimator of one's own."""
        return {} if self.params is UNSET else self.params
