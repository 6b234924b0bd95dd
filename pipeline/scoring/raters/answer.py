"""Extracts the reference answer of a sample and the answer given in its completion."""

import re
import unicodedata
from functools import lru_cache

from lachesis.pipeline.scoring.rater import Sample
from lachesis.pipeline.tasks.references import reference_text
from lachesis.pipeline.tasks.thoughts import answer_part
from lachesis.schemas.errors import ConfigError

__all__ = ["compiled", "given", "last_match", "reference"]

_INVISIBLE = "\ufeff\u200b\u200c\u200d\u2060\u200e\u200f"


def reference(sample: Sample) -> str | None:
    """Return the reference answer as text; None if the task has none, and then a rater abstains.

    Raises `ConfigError` if it is no single answer, a list say: that is the task's fault, and no sample pays for it.
    """
    answer = sample.task.get("answer")
    if answer is None:
        return None
    return same_text(reference_text(answer, f"item {sample.item or '?'} of environment {sample.env or '?'}"))


def given(sample: Sample, pattern: str | None) -> str | None:
    """Return the answer in the completion, after its thinking.

    All of it, or the last match of `pattern` (its first group if it has one). A pattern that names the thinking is
    looked for in all of the completion.

    None if the pattern does not occur.
    """
    text = sample.text if pattern is not None and "think" in pattern.lower() else answer_part(sample.text)
    if pattern is None:
        return same_text(text)
    last = last_match(compiled(pattern), text.replace("\r\n", "\n"))
    if last is None:
        return None
    found = last.group(1) if last.re.groups else last.group()
    return None if found is None else same_text(found)


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """Return the last match of a pattern, None without any."""
    last = None
    for found in pattern.finditer(text):
        last = found
    return last


def same_text(text: str) -> str:
    """Return a text with one line end, one spelling of accents, and no blanks around."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return unicodedata.normalize("NFC", text).strip().strip(_INVISIBLE).strip()


@lru_cache(maxsize=128)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern, in which `.` matches newlines. Raises ConfigError if it is not valid."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}.") from error
