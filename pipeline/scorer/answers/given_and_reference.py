"""Extracts the reference answer of a sample and the answer given in its completion."""

import re
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache

from lachesis.pipeline.scorer.rater import Sample
from lachesis.pipeline.tasks.references import INVISIBLE, reference_texts
from lachesis.pipeline.tasks.thoughts import answer_part
from lachesis.schemas.errors import ConfigError

__all__ = ["any_of", "best_of", "check_pattern", "compiled", "given", "last_match", "references"]


def references(sample: Sample) -> list[str]:
    """Return the reference answers as texts, any of which is right; none if the task has none.

    Raises `ConfigError` if one is no answer, for example a dictionary: that is the task's fault, and costs no sample.
    """
    answer = sample.task.get("answer")
    if answer is None:
        return []
    where = f"item {sample.item or '?'} of environment {sample.env or '?'}"
    return [same_text(text) for text in reference_texts(answer, where)]


def any_of(sample: Sample, rate: Callable[[str], float | None]) -> float | None:
    """Return the best rating by the reference answers; None, so the rater abstains, without any."""
    return best_of(map(rate, references(sample)))


def best_of(ratings: Iterable[float | None]) -> float | None:
    """Return the best of several references' ratings; None if a missing one might be better."""
    known = []
    unknown = False
    for rating in ratings:
        if rating == 1.0:
            return rating
        if rating is None:
            unknown = True
        else:
            known.append(rating)
    return None if unknown or not known else max(known)


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
    return unicodedata.normalize("NFC", text).strip().strip(INVISIBLE).strip()


@lru_cache(maxsize=128)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern, in which `.` matches newlines. Raises ConfigError if it is not valid."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}.") from error


def check_pattern(*, pattern: str | None = None, **_: object) -> None:
    """Raise `ConfigError` if a rater's pattern is no regular expression."""
    if pattern is not None:
        compiled(pattern)
