"""Finds the line of a TOML text on which a setting is written, so that an error can name it. Pure.

tomllib does not say where it found anything, so beginnings of the text are read: the setting is on the last line of the
shortest one that has it. So every way to write it counts: a dotted key, an inline table, an array of tables.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["NO_TOML", "line_of"]

NO_TOML: Final = (ValueError, RecursionError)
"""Errors of tomllib and decoding: TOMLDecodeError (a ValueError), and Python's own errors for numbers of thousands of
digits and for deep nesting."""
_CLOSINGS = ("\n", '\n"""', "\n'''", "\n]", "\n]]", "\n]}", "\n]}]")
"""Texts that end what may go on over several lines: a text, a list, a list in a list or in a table in either."""
_INDEX = re.compile(r"\[([0-9]+)\]")


def line_of(text: str, path: str) -> int | None:
    """Return the line, from 1 on, that sets `path` (`a.b[0].c`) first; None if the text does not have it."""
    lines = text.split("\n")
    if not _holds(_begun(lines, len(lines)), path):
        return None
    low, high = 1, len(lines)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _holds(_begun(lines, middle), path) else (middle + 1, high)
    return low


def _begun(lines: Sequence[str], count: int) -> Any:
    """Return what the first `count` lines set, those left out at their end that are no TOML without the next ones."""
    while count:
        for closing in _CLOSINGS:
            try:
                return tomllib.loads("\n".join(lines[:count]) + closing)
            except NO_TOML:
                continue
        count -= 1
    return {}


def _holds(value: Any, path: str) -> bool:
    """Return whether a value has something at `path`; a key may itself have dots in it."""
    if not path:
        return True
    if isinstance(value, Mapping):
        return any(
            path[len(key) : len(key) + 1] in {"", ".", "["} and _holds(inner, path[len(key) :].removeprefix("."))
            for key, inner in value.items()
            if path.startswith(key)
        )
    index = _INDEX.match(path) if isinstance(value, list) else None
    if index is None or int(index[1]) >= len(value):
        return False
    return _holds(value[int(index[1])], path[index.end() :].removeprefix("."))
