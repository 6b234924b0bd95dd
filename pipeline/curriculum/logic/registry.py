"""From configuration to a strategy, and the mix of environments."""

import math
from collections.abc import Mapping

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.irt import OnlineIRT
from lachesis.pipeline.curriculum.logic.schedules import Competence, EasyFirst, Pools
from lachesis.pipeline.curriculum.logic.sec import SelfEvolving
from lachesis.pipeline.curriculum.logic.strategy import ItemPool, Strategy
from lachesis.pipeline.user_code import load_module
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["STRATEGIES", "find_strategy", "load_strategy", "mix", "name_of"]

STRATEGIES: dict[str, type[Strategy]] = {
    "uniform": Strategy,
    "easy_first": EasyFirst,
    "competence": Competence,
    "pools": Pools,
    "sec": SelfEvolving,
    "irt": OnlineIRT,
}


def name_of(class_name: str) -> str:
    """Return what the configuration calls the strategy of this class.

    The class's own name for one of a user.
    """
    return next((name for name, kind in STRATEGIES.items() if kind.__name__ == class_name), class_name)


def load_strategy(items: ItemPool, config: CurriculumConfig) -> Strategy:
    """Make the strategy that the configuration names. Raises ConfigError if there is none such."""
    return find_strategy(config)(items, config)


def find_strategy(config: CurriculumConfig) -> type[Strategy]:
    """Return the class of the strategy that the configuration names.

    Raises ConfigError if there is none such.
    """
    if config.strategy in STRATEGIES:
        return STRATEGIES[config.strategy]
    place, colon, name = config.strategy.rpartition(":")
    if not colon:
        raise ConfigError(
            f"curriculum.strategy {config.strategy!r} is unknown; use {', '.join(STRATEGIES)}, module:Class or "
            "path/to/file.py:Class."
        )
    try:
        found = getattr(load_module(place, "curriculum.strategy:"), name, None)
    except ImportError as error:
        raise ConfigError(f"curriculum.strategy: cannot import {place!r}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(f"curriculum.strategy {config.strategy!r} is not a subclass of Strategy.")
    return found


def mix(scores: Mapping[str, float], floor: float = 0.05) -> dict[str, float]:
    """Return each environment's share, in proportion to its score and at least `floor`; shares sum to 1.

    All scores 0, or too many environments for the floor: equal shares. Raises DataError on a negative or non-finite
    score.
    """
    if any(not (score >= 0 and math.isfinite(score)) for score in scores.values()):
        raise DataError(f"environment scores must be finite and at least 0: {dict(scores)}.")
    if floor * len(scores) >= 1 or not any(scores.values()):
        return dict.fromkeys(scores, 1 / len(scores)) if scores else {}
    fixed: set[str] = set()
    while True:  # raising one to the floor takes from the others, which may then fall below it
        left = math.fsum(score for env, score in scores.items() if env not in fixed)
        rest = 1 - floor * len(fixed)
        low = {env for env in scores if env not in fixed and scores[env] / left * rest < floor}
        if not low:
            return {env: floor if env in fixed else score / left * rest for env, score in scores.items()}
        fixed |= low
