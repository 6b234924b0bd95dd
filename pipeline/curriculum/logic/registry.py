"""From configuration to a strategy."""

from typing import Any, cast

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.user_code import load_attribute
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.known_strategies import STRATEGIES, strategy_names
from lachesis.pipeline.curriculum.logic.strategy import ItemPool, Strategy
from lachesis.pipeline.extension import added, load_place
from lachesis.schemas.errors import ConfigError

__all__ = ["find_strategy", "load_strategy"]


def load_strategy(items: ItemPool, config: CurriculumConfig) -> Strategy:
    """Make the strategy that the configuration names. Raises ConfigError if there is none such."""
    return find_strategy(config)(items, config)


def find_strategy(config: CurriculumConfig) -> type[Strategy]:
    """Return the class of the strategy that the configuration names.

    Raises ConfigError if there is none such.
    """
    if config.strategy in STRATEGIES:
        built_in: Any = load_place(STRATEGIES[config.strategy])
        return cast("type[Strategy]", built_in)
    place, colon, name = added("strategies").get(config.strategy, config.strategy).rpartition(":")
    what = f"curriculum.strategy {config.strategy!r}"
    if not colon:
        raise ConfigError(
            f"{what} is neither module:Class nor path/to/file.py:Class nor a built-in one"
            f"{nearest(config.strategy, strategy_names())}"
        )
    found = load_attribute(place, name, what)
    if not (isinstance(found, type) and issubclass(found, Strategy)):
        raise ConfigError(f"{what} is not a subclass of Strategy")
    return found
