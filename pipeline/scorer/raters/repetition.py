"""Rates how little a completion repeats itself: the share of its n-grams that are distinct.

The n-grams are of words. A character is a word of its own in scripts without blanks between words, in a run too long
for a word, and where a few characters repeat again and again, for example "hahahaha". Numbers, rules and the rules of
tables are words.
"""

import re
from collections.abc import Iterator

from lachesis.pipeline.common.unspaced_scripts import UNSPACED
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.schemas.errors import ConfigError

__all__ = ["repetition"]

_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_MAX_WORD_CHARS = 32
"""Characters of a word; longer ones are no words, and each of their characters counts."""
_RUN = re.compile(r"(.{1,12}?)\1{2,}", re.DOTALL)
_MIN_RUN_CHARS = 10
"""Characters from which on a few that follow one another three times or more are no part of a word."""
_NUMBER = re.compile(r"\d{1,3}(?:[,_]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?")
_MAX_DIGITS = 17
"""Digits of a number whatever they are: as many as 1/3 has."""
_ROUND = re.compile(r"[1-9]\d{0,8}0*")
_RULE = re.compile(r"([-=_*~#.+─━═])\1*|\|?(?::?-+:?\|)+(?::?-+:?)?|\+(?:[-=]+\+)+")
_MAX_RULE_CHARS = 160
_MAX_LONE_RULE_CHARS = 16


def _check(*, n: int = 3) -> None:
    if n < 1:
        raise ConfigError(f"rater repetition: n is {n}; it must be at least 1.")


@rater(bounds=(0.0, 1.0), version="3", check=_check)
def repetition(sample: Sample, *, n: int = 3) -> float:
    """Return distinct / all n-grams of words: 1 for fewer than n words, 0 for none."""
    _check(n=n)
    words = _text_units(sample.completion)
    if not words:
        return 0.0
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def _text_units(text: str) -> list[str]:
    """Return the words in their order. In a text of rules alone, their characters."""
    units = [unit for word in _WORD.findall(text) for unit in _units(word)]
    if len(text) > _MAX_LONE_RULE_CHARS and all(_RULE.fullmatch(unit) for unit in units):
        return list("".join(units))
    return units


def _units(word: str) -> Iterator[str]:
    if len(word) <= _MAX_RULE_CHARS and _RULE.fullmatch(word):
        yield word
        return
    if len(word) > _MAX_WORD_CHARS and not _is_number(word):
        yield from word
        return
    place = 0
    for run in _RUN.finditer(word):
        if run.end() - run.start() < _MIN_RUN_CHARS or _in_number(word, run):
            continue
        if word[place : run.start()]:
            yield word[place : run.start()]
        yield from run.group()
        place = run.end()
    if word[place:]:
        yield word[place:]


def _in_number(word: str, run: re.Match[str]) -> bool:
    return any(
        number.start() <= run.start() and run.end() <= number.end() and _is_number(number.group())
        for number in _NUMBER.finditer(word)
    )


def _is_number(text: str) -> bool:
    digits = re.sub(r"[.,_]", "", text)
    return digits.isdigit() and (len(digits) <= _MAX_DIGITS or _ROUND.fullmatch(digits) is not None)
