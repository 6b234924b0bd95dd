"""Environments by name: a built-in one, `module:Class`, or `path/to/file.py:Class`, with parameters checked."""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lachesis.pipeline.environments.binding import bind_arguments, nearest
from lachesis.pipeline.environments.environment import Environment
from lachesis.schemas.errors import ConfigError

__all__ = ["BUILTIN", "load_environment"]

BUILTIN = {"reasoning_gym": "lachesis.pipeline.environments.reasoning_gym:ReasoningGym"}
"""Built-in environments by name."""


def load_environment(name: str, params: Mapping[str, Any] | None = None) -> Environment:
    """Return the environment `name` made with `params`.

    Raises ConfigError naming what is unknown (with the nearest known name), missing or of the wrong type. Errors inside
    the named module or class propagate as they are.
    """
    place, colon, attribute = BUILTIN.get(name, name).rpartition(":")
    if not colon or not place or not attribute:
        raise ConfigError(f"no built-in environment {name!r}{nearest(name, BUILTIN)}; your own is module:Class")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    kind = getattr(module, attribute, None)
    if kind is None:
        classes = [key for key, value in vars(module).items() if _is_environment(value)]
        raise ConfigError(f"environment {name!r}: {place} has no {attribute!r}{nearest(attribute, classes)}")
    if not _is_environment(kind):
        raise ConfigError(f"environment {name!r}: {attribute} is not a subclass of lachesis.Environment")
    try:
        arguments = bind_arguments(kind, params or {}, strict=True)
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: {error}") from error
    env: Environment = kind(**arguments)
    if len(env) < 1:
        raise ConfigError(f"environment {name!r} has no tasks")
    return env


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def _from_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # only the module that was asked for: one that is missing inside it is its author's to see
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"environment module {name!r} was not found: install it, put its folder on PYTHONPATH, or name the file: "
            "path/to/file.py:Class"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"environment file {str(path)!r} does not exist")
    path = path.resolve()
    name = f"lachesis_environment_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"environment file {str(path)!r} is no Python source")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
