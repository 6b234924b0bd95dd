"""Writes a configuration as TOML."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from lachesis.pipeline.extension import added

__all__ = ["to_toml", "toml_value"]


def to_toml(config: msgspec.Struct) -> str:
    """Return the configuration as TOML that loads to an equal one.

    What is None is left out, as TOML has no null; and what extensions add, where it is the default: without them it
    would be unknown.
    """
    lines: list[str] = []
    _table(lines, (), _without_unused_extensions(msgspec.to_builtins(config)))
    return "\n".join(lines).lstrip() + "\n"


def _without_unused_extensions(tree: dict[str, Any]) -> dict[str, Any]:
    for path, setting in added("settings").items():
        *tables, name = path.split(".")
        table = tree
        for one in tables:
            table = table.get(one, {})
        if table.get(name) == msgspec.to_builtins(setting.default):
            table.pop(name, None)
    return tree


def _table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in table.items() if value is not None and not isinstance(value, dict)}
    if path and plain:
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {toml_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _table(lines, (*path, key), value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML, tables in one line."""
    if isinstance(value, Mapping):
        inner = (f"{_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return "{ " + ", ".join(inner) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
