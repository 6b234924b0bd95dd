"""`lachesis env atropos`: brings a run up with an environment of Atropos, without HTTP."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.toml import toml_value
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli import up
from lachesis.services.cli.options import Options, with_options

__all__ = ["env_atropos"]

_NOT_IN_NAMES = re.compile(r"[^a-z0-9_-]+")


@with_options
def env_atropos(  # noqa: PLR0917 - options of the command line
    options: Options,
    place: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="MODULE:CLASS or path/to/file.py:CLASS.")],
    python: Annotated[str | None, typer.Option(help="Interpreter that has atroposlib. Default: this one.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the environment. Default: that of the class.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="A field of the class' configuration. Repeatable.")
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Number of its items that are tasks. Default: 1000.")] = None,
) -> None:
    """Run everything, as `lachesis up` does, with an environment of Atropos added to the configuration.

    It runs in a process of its own. Its tokenizer is that of the run's model unless a setting names another.
    """
    module, _, cls = place.rpartition(":")
    if not module or not cls:
        raise ConfigError(f"{place!r}: write MODULE:CLASS or path/to/file.py:CLASS")
    env = name or _NOT_IN_NAMES.sub("-", cls.lower()).strip("-")
    given = {
        "place": place,
        "python": python,
        "items": items,
        "settings": _settings(options.config(), env, setting or ()),
    }
    sets = [f"environments.{env}.kind=atropos"]
    sets += [
        f"environments.{env}.params.{key}={toml_value(value)}" for key, value in given.items() if value is not None
    ]
    up.bring_up(replace(options, sets=(*options.sets, *sets)))


def _settings(config: RunConfig, env: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return the fields that the configuration has, with those of the command line in their place."""
    known = config.environments.get(env)
    found = {"tokenizer_name": str(config.model)} if config.model is not None else {}
    found |= known.params.get("settings", {}) if known is not None else {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--setting {text!r}: write KEY=VALUE")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    """Read a value as `--set` does: as TOML, and what is no TOML as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
