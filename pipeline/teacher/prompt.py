"""Fills the template of the teacher's own prompt, which may hold the answer to the task. Pure.

A template is text with fields in braces. `{question}` is the last message of the user before the first sampled turn,
any other field is one of the rollout's `task`. Guarantees that values are put in as they are: braces in them mean
nothing.
"""

import hashlib
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["QUESTION", "PromptTemplate"]

QUESTION = "question"


class PromptTemplate:
    """A template that was read once. Raises `ConfigError` where it has no `{question}`, or fields that are no names."""

    def __init__(self, text: str) -> None:
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            self._parts = list(_parts(text))
        except ValueError as error:
            raise ConfigError(
                f"teacher.prompt: {error}; a field is written {{answer}}, a brace of the text {{{{ or }}}}"
            ) from error
        if QUESTION not in {field for _, field in self._parts}:
            raise ConfigError(
                "teacher.prompt has no {question}: the teacher would not read the task. Put it where the user's "
                "message belongs"
            )

    def fill(self, question: str, task: Mapping[str, Any]) -> str:
        """Return the text for one task.

        Raises `DataError` where the task lacks a field, or has one that is neither text nor number.
        """
        written = []
        for literal, field in self._parts:
            written.append(literal)
            if field is not None:
                written.append(question if field == QUESTION else _value(field, task))
        return "".join(written)


def _parts(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield each literal text with the field after it. Raises `ValueError` where a field is no plain name."""
    for literal, field, form, conversion in Formatter().parse(text):
        if field is not None and (not field.isidentifier() or form or conversion):
            raise ValueError(f"{{{field}}} is no field's name alone")
        yield literal, field


def _value(field: str, task: Mapping[str, Any]) -> str:
    value = task.get(field)
    if value is None:
        known = ", ".join(sorted(task)) or "none"
        raise DataError(f"teacher.prompt: the task has no {field!r}; it has: {known}")
    if not isinstance(value, (str, int, float)):
        raise DataError(f"teacher.prompt: the task's {field!r} is a {type(value).__name__}, neither text nor number")
    return str(value)
