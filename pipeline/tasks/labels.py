"""Reads the skill and the difficulty of a row, as data sets write them. Pure."""

import math
import re
from typing import Any

from lachesis.pipeline.tasks.columns import is_blank
from lachesis.pipeline.tasks.references import is_absent_text
from lachesis.schemas.errors import ConfigError

__all__ = ["difficulty_in", "skill_in"]

_NAMED_NUMBER = re.compile(r"[A-Za-z][A-Za-z _:-]*(?P<number>\d+(?:\.\d+)?)")
"""A number after a word, as in MATH: Level 5."""


def skill_in(value: Any) -> str | None:
    """Return the name of a skill; None if it is missing. A list of one skill stands for it."""
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    return None if _is_nothing(value) else str(value)


def difficulty_in(value: Any, where: str) -> float | None:
    """Return a difficulty; None if it is missing. Raises `ConfigError` if it is no finite number."""
    if _is_nothing(value):
        return None
    named = _NAMED_NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
    try:
        number = float("" if isinstance(value, bool) else value if named is None else named["number"])
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{where}: its difficulty {value!r:.60} is no number; a word for it can be the skill (skill = the column's "
            "name), of which the curriculum learns itself how hard it is"
        ) from None
    if math.isnan(number):
        return None
    if math.isinf(number):
        raise ConfigError(f"{where}: its difficulty {value!r:.60} is no finite number")
    return number


def _is_nothing(value: Any) -> bool:
    return is_blank(value) or (isinstance(value, str) and is_absent_text(value.strip()))
