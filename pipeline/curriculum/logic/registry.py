"""From configuration to a strategy."""

from lachesis.pipeline.common.nearest import nearest
from lachesis.pipeline.common.user_code import load_attribute
from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.gain_per_token import GainPerToken
from lachesis.pipeline.curriculum.logic.irt import OnlineIRT
from lachesis.pipeline.curriculum.logic.schedules import Competence, EasyFirst, Epoch, Pools
from lachesis.pipeline.curriculum.logic.sec import SelfEvolving
from lachesis.pipeline.curriculum.logic.strategy import ItemPool, Strategy
from lachesis.pipeline.extension import added, with_added
from lachesis.schemas.errors import ConfigError

__all__ = ["STRATEGIES", "find_strategy", "load_strategy", "name_of", "strategy_names"]

STRATEGIES: dict[str, type[Strategy]] = {
    "uniform": Strategy,
    "epoch": Epoch,
    "easy_first": EasyFirst,
    "competence": Competence,
    "pools": Pools,
    "sec": SelfEvolving,
    "irt": OnlineIRT,
    "gain_per_token": GainPerToken,
}


def strategy_names() -> tuple[str, ...]:
    """Return the names of all strategies, those of extensions too."""
    return tuple(with_added("strategies", STRATEGIES))


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
