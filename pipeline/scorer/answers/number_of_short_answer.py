"""Reads the number that a short answer holds, as people write it.

Guarantees that nothing is read from a possible expression, list, range or bound: an answer with several numbers or with
an operator gives None.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re

from lachesis.pipeline.scorer.answers.contradicted_numbers import is_contradicted_in_letters
from lachesis.pipeline.scorer.answers.hedges import hedge_around, is_assurance
from lachesis.pipeline.scorer.answers.latex import plain
from lachesis.pipeline.scorer.answers.number_surroundings import (
    is_changed,
    operator_after,
    operator_before,
    signed,
    unit_of,
    without_marks,
)
from lachesis.pipeline.scorer.answers.numbers_in_digits import Number, NumberToken, number_tokens
from lachesis.pipeline.scorer.answers.numbers_in_words import spelled_out

__all__ = ["read_number"]

_MAX_ANSWER_CHARS = 2048

_ENDING = re.compile(r"(?<![.])[.,;:。]$")
_NAME = re.compile(r"\s*+(?:\\?[A-Za-z]++(?:\s*+_\s*+(?:\{\s*+\w++\s*+\}|\w))?'*+\s*+)++(?:\([-\w\s,=.]*+\))?\s*+")
_COMMAND = re.compile(r"\\(?!(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle|triangle|therefore)(?![a-z]))")
_OF_NAMES = re.compile(
    r"\s*+(?=[A-Za-z(\\])(?:[A-Za-z+×*/'()\s-]|\\(?:sin|cos|tan|ln|log|arg|quotient|alpha|beta|gamma|theta)(?![A-Za-z]))++"
)
"""An expression of names alone, whose value is what it is said to be: m + n, \\sin x; not |x|."""
_INDEX = re.compile(r"(?<=[A-Za-z])_(?:\w|\{\w+\})")
_RELATION = re.compile(r"\s*(?:(?<![<>!])=|~)\s*")
_BOUND_BEFORE = re.compile(
    r"(?:\bthan|\bat (?:least|most)|\bup to|\b(?:over|under|above|below|nearly|almost|between|exceeds?|exceeding|"
    r"beyond|within|until|every|root of|sum of|product of|of either))\W*$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r"^\W*at (?:least|most)\b|^\W*(?:\w+\s+)?(?:more|less|fewer|greater|larger|smaller|higher|lower|other)\s+than\b"
    r"|^\W*(?:or|and)\s+(?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under|beyond|up)"
    r"\b|\b(?:squared|cubed|factorial|times|plus|minus|divided|multiplied|raised|to the power|is wrong|incorrect)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not|never|neither|nor|cannot|either|unless|no longer|except|without|\w+n't)\b"
    r"|\bor\s*$|^\s*(?:or|and|to)\s*$",
    re.IGNORECASE,
)
_LISTED = re.compile(r",(?!\d{3}(?!\d))|;")
_POINT = re.compile(r"[(\[][^()\[\]]*\d(?:,(?!\d{3}(?!\d))|;)[^()\[\]]*[)\]]")
_FOREIGN = re.compile(r"[*×/^+<>≤≥≠|&!=±√∑∫π∞\\{}\[\]]")
_UNIT_TAIL = re.compile(
    r"[\s-]*(?:[A-Za-zµΩ°]+\.?)(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?"
    r"(?:(?:\s*(?:[/*×]|per)\s*|\s+(?=[A-Za-z]+\s*\^))[A-Za-z]+(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?)*"
)
_WORD = re.compile(r"[^\W\d_]+")


def read_number(text: str) -> Number | None:
    """Return the number that a short answer holds, in digits or words; None where it is not one alone."""
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    shown = _ENDING.sub("", without_marks(plain(text)).strip(" \t\r\n~"))
    side = _right_side(_unbracketed(shown))
    if side is None:
        return None
    shown = _unbracketed(side)
    tokens = list(number_tokens(shown))
    if not tokens:
        value = spelled_out(shown)
        return None if value is None else Number(value)
    if len(tokens) != 1 or _POINT.search(shown):
        return None
    return _alone(tokens[0], shown)


def _unbracketed(text: str) -> str:
    """Return a text without brackets and quotes around all of it; a point or an interval as it is."""
    if text.startswith("\\{") and text.endswith("\\}") and not _LISTED.search(text):
        text = text[2:-2].strip()
    while text[:1] + text[-1:] in {"()", "[]", '""', "''"} and "(" not in text[1:-1] and len(text) > 2:
        if text[0] in "([" and _LISTED.search(text):
            break
        text = text[1:-1].strip()
    return text


def _right_side(text: str) -> str | None:
    """Return what stands beside the equals signs, if all else are names; None if it is an equation."""
    sides = _RELATION.split(text)
    if len(sides) == 2 and _is_name(sides[1]):
        sides.reverse()  # 18 = x
    for side in sides[:-1]:
        if side and not _is_name(side):
            return None
    return sides[-1].strip()


def _is_name(side: str) -> bool:
    """Return whether a side of an equation only says what the other side is the value of."""
    if _NEGATION.search(side) or re.search(r"\bor\b", side):
        return False
    if _NAME.fullmatch(side) and not _COMMAND.search(side):
        return True
    return _OF_NAMES.fullmatch(_INDEX.sub("", side)) is not None


def _alone(token: NumberToken, text: str) -> Number | None:
    """Return the only number of a text, if nothing about it changes what it says."""
    head, tail = text[: token.start], text[token.end :]
    head, negative, _ = signed(head)
    if token.number is None or operator_before(head) or operator_after(tail):
        return None
    if negative is False and re.search(r"\b(?:minus|negative)\W*$", head, re.IGNORECASE):
        head, negative = re.sub(r"\b(?:minus|negative)\W*$", "", head, flags=re.IGNORECASE), True
    unit = _UNIT_TAIL.match(tail)
    rest = tail[unit.end() :] if unit is not None else tail
    if _WORD.search(head):
        rest = rest.removesuffix("!")
    if _FOREIGN.search(head) or _FOREIGN.search(rest):
        return None
    if (
        hedge_around(head, tail) is not None
        or is_assurance(token.number, head, tail)
        or is_changed(head, tail)
        or is_contradicted_in_letters(token.number, head, tail)
        or _BOUND_BEFORE.search(head)
        or _BOUND_AFTER.search(tail)
        or _NEGATION.search(head)
        or _NEGATION.search(tail)
    ):
        return None
    words = _WORD.findall(head)
    if words and len(words[-1]) == 1 and words[-1] not in "aI" and not re.search(r"[:,.]\W*$|^\W*[A-J]\W*$", head):
        return None  # x 18: a product
    number = token.number._replace(unit=unit_of(head, tail))
    if not negative:
        return number
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))
