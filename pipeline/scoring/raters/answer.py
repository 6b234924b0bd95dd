"""Extracts the reference answer of a sample and the answer given in its completion."""

import re
from functools import lru_cache

from lachesis.pipeline.scoring.rater import Sample
from lachesis.schemas.errors import ConfigError

__all__ = ["compiled", "given", "reference"]


def reference(sample: Sample) -> str | None:
    """Return the reference answer as text; None if the task has none, and then a rater abstains."""
    answer = sample.task.get("answer")
    return None if answer is None else str(answer).strip()


def given(sample: Sample, pattern: str | None) -> str | None:
    """Return the answer in the completion.

    All of it, or the last match of `pattern` (its first group if it has one).

    None if the pattern does not occur.
    """
    if pattern is None:
        return sample.completion.strip()
    last = None
    for match in compiled(pattern).finditer(sample.completion):
        last = match
    if last is None:
        return None
    found = last.group(1) if last.re.groups else last.group()
    return None if found is None else found.strip()


@lru_cache(maxsize=128)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the compiled pattern, in which `.` matches newlines. Raises ConfigError if it is not valid."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"pattern {pattern!r} is not a regular expression: {error}.") from error
