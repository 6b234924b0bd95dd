"""Configuration of the curriculum, one per environment."""

from msgspec import Struct

from lachesis.pipeline.common.field_types import check_field_types
from lachesis.pipeline.common.paths import CodePath
from lachesis.schemas.errors import ConfigError

__all__ = ["CurriculumConfig"]

_NEEDS_OF_POOL = {
    "epoch": "the order",
    "easy_first": "the difficulties",
    "competence": "the difficulties",
    "sec": "the difficulties",
}
"""Strategies that cannot learn about items one by one as clients name them, and what of the pool each needs."""


class CurriculumConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a strategy draws by, and how it treats late feedback. Fields of other strategies are ignored."""

    strategy: CodePath = "irt"
    """uniform, epoch (every item once an epoch), easy_first, competence, pools, sec, irt, gain_per_token (with the
    fields of irt, except sharpness and first_pass), or "module:Class" or "path/to/file.py:Class" of a strategy of
    your own."""
    max_age: int = 32
    """Policy steps after which feedback is ignored. Default 32."""
    age_half_life: float = 8.0
    """Policy steps after which feedback counts half. Default 8."""
    remembered: int = 8192
    """Event ids kept to recognise repeated feedback. Default 8192."""
    explore: float = 0.03
    """irt: share of the probability that goes to items by how long they were not seen. Default 0.03."""
    total_steps: int = 1000
    """easy_first, competence: policy steps over which the curriculum opens up. Default 1000."""
    initial_competence: float = 0.05
    """competence: share of the items, easiest first, that are drawn at the start. Default 0.05."""
    bins: int = 10
    """easy_first, sec: difficulty bins of equal size (per skill for sec). Default 10."""
    learning_rate: float = 0.5
    """sec: weight of a new observation in an arm's value. Default 0.5."""
    temperature: float = 0.2
    """sec: of the softmax over arm values, which lie in [0, 1]. Default 0.2."""
    deviation: float = 5.0
    """irt: standard error of an item's difficulty before its first result, in logits. Default 5."""
    prior_deviation: float = 2.0
    """irt: the same for items with a prior: how far a prior may be from the truth. Default 2."""
    prior_spread: float = 2.0
    """irt: standard deviation of the priors over the items, in logits, to which they are scaled from their own unit.
    Default 2."""
    wander: float = 0.15
    """irt: how far an item's difficulty may move from one of its results to the next, in logits. Default 0.15."""
    ability_rate: float = 0.2
    """irt: step of a skill's ability, in logits. Default 0.2."""
    sharpness: float = 3.0
    """irt: exponent of what p(1-p) is expected to be in an item's weight, p its success. Default 3."""
    first_pass: float = 1.5
    """irt: passes over the pool (results for each drawable item) until repeats are drawn as if the policy learned as
    much from them as from the first meeting; before, items that were not met come first, unless they seem solved or
    hopeless. 0: from the start. Default 1.5."""
    chance: float = 0.3
    """irt: probability, before its first result, that an item's success does not follow the ability (coin flips, wrong
    labels); 0 takes all items for sound. Higher than their share of the items, since more of them have even odds.
    Default 0.3."""

    repeat_worth: float = 0.4
    """gain_per_token: what a group of an item teaches, as a share of what its group before did. Raise it to 1
    for a small pool that is gone through many times and still teaches. Default 0.4."""

    def missing_of_pool(self, *, is_foreign: bool) -> str | None:
        """Return what the strategy would have to know of all items and does not; None: it can learn.

        Only of the items of a foreign environment it learns no more than their names, one by one.
        """
        return _NEEDS_OF_POOL.get(self.strategy) if is_foreign else None

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("max_age", "remembered", "total_steps", "bins"):
            if getattr(self, name) < 1:
                raise ConfigError(f"curriculum.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("age_half_life", "temperature", "ability_rate", "sharpness"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"curriculum.{name} is {getattr(self, name)}; it must be positive and finite.")
        for name in ("deviation", "prior_deviation", "prior_spread"):
            if not 0 < getattr(self, name) <= 100:
                raise ConfigError(
                    f"curriculum.{name} is {getattr(self, name)} logits; it must be positive, at most 100."
                )
        for name, low, high, unit in (
            ("wander", 0, 100, " logits"),
            ("first_pass", 0, 1000, " passes"),
            ("repeat_worth", 0.001, 1, ""),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"curriculum.{name} is {getattr(self, name)}{unit}; it must lie between {low} and {high}."
                )
        if not 0 <= self.chance < 1:
            raise ConfigError(f"curriculum.chance is {self.chance}; it must be at least 0 and below 1.")
        for name in ("explore", "initial_competence", "learning_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"curriculum.{name} is {getattr(self, name)}; it must lie between 0 and 1.")
