"""Rates whether an answer is in its question's language, or in one that is named."""

from collections.abc import Sequence

from lachesis.pipeline.common.text_language import language_of
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.pipeline.tasks.thoughts import answer_part
from lachesis.schemas.errors import ConfigError

__all__ = ["language"]

_PART_CHARS = 256
"""Characters of the beginning, the middle and the end, which are looked at."""


def _check(*, expected: Sequence[str] | str = (), thinking: bool = False) -> None:
    for code in _codes(expected):
        if not (code.isascii() and code.isalpha() and code.islower() and len(code) in {2, 3}):
            raise ConfigError(f"rater language: expected has {code[:40]!r}; ISO 639 codes are meant, as 'en' or 'de'.")


@rater(bounds=(0.0, 1.0), check=_check)
def language(sample: Sample, *, expected: Sequence[str] | str = (), thinking: bool = False) -> float | None:
    """Return the share of the answer's beginning, middle and end that is in a language of `expected`.

    Without `expected`, in that of the last question. Parts whose language is not clear do not count; None without any
    other, or if the question's is not clear. With `thinking`, the thought is a part of the answer.
    """
    wanted = _codes(expected) or _languages(_question(sample))
    found = _languages(sample.text if thinking else answer_part(sample.text))
    if not wanted or not found:
        return None
    return sum(one in wanted for one in found) / len(found)


def _codes(expected: Sequence[str] | str) -> list[str]:
    return [expected] if isinstance(expected, str) else list(expected)


def _question(sample: Sample) -> str:
    asked = (message for message in reversed(sample.messages) if message.get("role") == "user")
    message = next(asked, None)
    return sample.prompt if message is None else str(message.get("content", ""))


def _languages(text: str) -> list[str]:
    if len(text) <= 3 * _PART_CHARS:
        parts = [text]
    else:
        middle = (len(text) - _PART_CHARS) // 2
        parts = [text[:_PART_CHARS], text[middle : middle + _PART_CHARS], text[-_PART_CHARS:]]
    return [found for part in parts if (found := language_of(part)) is not None]
