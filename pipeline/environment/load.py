"""Loads an environment by name: built-in, `module:Class`, or `path/to/file.py:Class`.

Its parameters are checked, and so are the keys of its tasks.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lachesis.pipeline.common.closest_name import nearest
from lachesis.pipeline.common.user_code import load_module, refuse_ending
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.extension import EnvironmentKind, with_added
from lachesis.pipeline.tasks.binding import bind_arguments
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.schemas.errors import ConfigError

__all__ = ["environment_kinds", "item_keys_of", "load_environment"]

_BUILTIN = {
    "dataset": "lachesis.pipeline.environment.dataset:Dataset",
    "spell_backward": "lachesis.pipeline.environment.spelling_tasks:SpellBackward",
}


def environment_kinds() -> dict[str, str]:
    """Return by name the place of each kind of environment, those of extensions too."""
    kinds = with_added("environments", {name: EnvironmentKind(place=place) for name, place in _BUILTIN.items()})
    return {name: kind.place for name, kind in kinds.items() if kind.place is not None}


def load_environment(name: str, params: Mapping[str, Any] | None = None) -> Environment:
    """Return the environment `name` made with `params`.

    Raises ConfigError naming what is unknown (with the nearest known name), missing or of the wrong type. Errors inside
    the named module or class propagate as they are.
    """
    kinds = environment_kinds()
    place, colon, attribute = kinds.get(name, name).rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"{name!r} is neither module:Class nor a built-in environment{nearest(name, kinds)}")
    module = load_module(place, "environment")
    kind = getattr(module, attribute, None)
    if kind is None:
        classes = [key for key, value in vars(module).items() if _is_environment(value)]
        raise ConfigError(f"environment {name!r}: {place} has no {attribute!r}{nearest(attribute, classes)}")
    if not _is_environment(kind):
        hint = ""
        if all(callable(getattr(kind, method, None)) for method in ("reset", "step")):
            hint = f'; it has reset and step, as gem and gym have: set kind = "steps" and params.place = "{name}"'
        raise ConfigError(f"environment {name!r}: {attribute} is not a subclass of lachesis.Environment{hint}")
    try:
        arguments = bind_arguments(kind, params or {}, strict=True)
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: {error}") from error
    with refuse_ending(f"environment {name!r}: its code"):
        env: Environment = kind(**arguments)
        tasks = len(env)
    if tasks < 1:
        raise ConfigError(f"environment {name!r} has no tasks")
    return env


def item_keys_of(env: Environment) -> Keys:
    """Return the keys of an environment's tasks.

    Raises `ConfigError` where its own `item_keys` returns something else.
    """
    name = f"{type(env).__name__}.item_keys"
    with refuse_ending(name):
        given: Any = env.item_keys()
    whole = isinstance(given, list) and all(isinstance(one, int) and 0 <= one < 1 << 64 for one in given)
    keys = np.array(given, np.uint64) if whole else np.asarray(given)
    if keys.dtype.kind not in "iu" or keys.shape != (len(env),):
        raise ConfigError(
            f"{name} returns {given!r:.60}: it must return a whole number of 64 bits for each of the {len(env)} tasks"
        )
    return keys.astype(np.uint64)


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)
