"""Recipes: named settings of advantage and loss, which a run's own settings override.

Each is a TOML file. `recipe = "dapo"` in a configuration lays `dapo.toml` beneath everything else that is set. The
comment at the top of a file says what it is, when to take it and where it is from.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lachesis.pipeline.common.closest_name import nearest
from lachesis.schemas.errors import ConfigError

__all__ = ["Recipe", "find_recipe", "recipes"]


class Recipe(NamedTuple):
    """Named settings. `about`: the comment at the top of its file, as one line."""

    name: str
    about: str
    settings: dict[str, Any]


@cache
def recipes() -> dict[str, Recipe]:
    """Return all recipes by name, in the order of their names."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.toml")):
        text = file.read_text(encoding="utf-8")
        comment = text.partition("\n[")[0]
        about = " ".join(line.removeprefix("#").strip() for line in comment.splitlines())
        found[file.stem] = Recipe(file.stem, about, tomllib.loads(text))
    return found


def find_recipe(name: object) -> Recipe:
    """Return the recipe of this name. Raises `ConfigError` where there is none."""
    known = recipes()
    if not isinstance(name, str) or name not in known:
        raise ConfigError(
            f"recipe: there is none named {name!r:.80}{nearest(str(name), known)}; `lachesis config recipes` shows all"
        )
    return known[name]
