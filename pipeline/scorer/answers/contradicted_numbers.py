"""Finds a number in digits that letters beside it contradict: "seventeen (18)" is no answer. Pure."""

import re
from fractions import Fraction

from lachesis.pipeline.scorer.answers.numbers_in_digits import Number
from lachesis.pipeline.scorer.answers.numbers_in_words import COUNTING, last_spelled_out

__all__ = ["is_contradicted_in_letters"]

_IN_BRACKETS = re.compile(r"^[^()\d\n]{0,24}\(\s*([A-Za-z][A-Za-z\s-]*)\)")
_BEFORE_ANSWER = re.compile(
    r"(?:^|[:=.*]|\b(?:is|are|was|were|be|equals?|makes?|gives?|gets?|has|have|had|needs?|exactly|total|answer))\W*$",
    re.IGNORECASE,
)
"""What stands before the letters of an answer. Behind other words they may count something: the first three (18)."""
_MAX_COUNTED = 12
_MAX_ROUNDING = Fraction(1, 50)
_WINDOW = 120


def is_contradicted_in_letters(number: Number, head: str, tail: str) -> bool:
    """Return whether letters before a number in brackets, or in brackets behind it, say another.

    "One third (0.33)" is rounded, and "only one (18)" counts: neither is a contradiction.
    """
    letters = _IN_BRACKETS.match(tail)
    if letters is not None:
        said = last_spelled_out(letters[1])
        if said is not None and not said.head.strip() and not said.tail.strip():
            return _differ(number, said.value)
    opened = head[-_WINDOW:].rstrip()
    if not opened.endswith("(") or not re.match(r"\s*%?\s*\)", tail):
        return False
    said = last_spelled_out(opened[:-1])
    if said is None or said.tail.strip(" *-"):
        return False
    counts = abs(said.value) <= _MAX_COUNTED and _BEFORE_ANSWER.search(said.head) is None
    word = opened[:-1].split()[-1].lower() if opened[:-1].split() else ""
    is_pronoun = word in COUNTING and said.value == 1 and bool(said.head.strip())
    return not counts and not is_pronoun and _differ(number, said.value)


def _differ(number: Number, said: Fraction) -> bool:
    """Return whether no meaning of a number is, but for rounding and its sign, what letters say."""
    values = [number.value, *number.others, number.value / 100 if number.percent else number.value]
    return all(abs(abs(value) - abs(said)) > _MAX_ROUNDING * max(abs(value), abs(said)) for value in values)
