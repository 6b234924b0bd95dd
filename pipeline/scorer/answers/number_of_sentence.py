"""Reads the last number of a text, if its sentence offers that number alone.

Guarantees that nothing is read from alternatives, lists, ranges, denials, operations and degrees of certainty. A wrong
number is worse than none.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re
from fractions import Fraction

from lachesis.pipeline.scorer.answers.contradicted_numbers import is_contradicted_in_letters
from lachesis.pipeline.scorer.answers.hedges import hedge_around, is_assurance, rates_another
from lachesis.pipeline.scorer.answers.joined_numbers import joins
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
from lachesis.pipeline.scorer.answers.numbers_in_words import COUNTING, last_spelled_out, spelled_out

__all__ = ["last_number_in"]

_WINDOW = 2048
"""Characters before the last digit of a text in which its last number is looked for."""
_TAIL = 200
_END_OF_TEXT = "\ue001"
_POINT = re.compile(r"[(\[{]\s*-?\d+,(?!\d{3}(?!\d))\d+\s*[)\]}]")
"""(12,18): a point, and no decimal comma."""
_MAX_PARTS = 8
"""Numbers before the last one that are looked at, where those behind them turn out to be asides."""
_OPERATION = re.compile(r"[-*+/^×±]|\b(?:x|times|by|plus|minus|over|divided)\b")
_TAG = re.compile(r"</?[A-Za-z][\w-]{0,20}>|\[/?[A-Z]{2,20}\]")
_CALCULATOR = re.compile(r"<<[^<>\n]{0,200}>>")
_ARROW = re.compile(
    r"(?:[-=]+>|→|⇒|⟹|⟶|➜|\\(?:to|[Rr]ightarrow|implies|Longrightarrow)(?![A-Za-z]))(?=\s*[$€£]?\s*[-+\d.])"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}")
_NUMBER_BEFORE = re.compile(r"([-+*/×÷^=)]?)\s*[$€£]?\d[\d.,]*\s*$")
_ITEMS = re.compile(
    r"(?:^|[\s(])(?:1|a|i)[.)]\s*[$€£]?\d[\d.,]*\s*[\n,;\s]\s*\(?(?:2|b|ii)[.)]\s*[$€£]?\d[\d.,]*\s*$", re.IGNORECASE
)
"""(a) 12 (b) 18"""
_VARIABLE_BEFORE = re.compile(r"(?:^|[\s(,])[A-Za-z]\s*$")
_SENTENCE_START = re.compile(r"(?<!\bvs)(?<!approx)(?<!\be\.g)(?<!\bi\.e)(?<!\bca)[.!?](?=\s)|\n|。")
_SENTENCE_END = re.compile(r"[.!](?=\s+[^a-z\s]|\s*$)|\?(?!\s*[Nn]o)|\n|。")
_ROW = re.compile(r"^[ \t]*\|(?:[^|\n]*\|){2,}[ \t]*$")
_BULLET = re.compile(r"(?:^|\n)[ \t]*[*•][ \t]+[$€£]?$")
_PERCENT = re.compile(r"\s*(?:%|per\s?cent\b)", re.IGNORECASE)
_SURE_ASIDE = re.compile(
    r"\((?=[^()\n]*\b(?:sure|certain|confident|confidence|certainty|correct)\b)[^()\n]{0,80}\)", re.IGNORECASE
)
_CONTRAST = re.compile(
    r"^(?:\s*[A-Za-z°%$€£]+)?\s*[,(]?\s*(?:and\s+)?(?:not|rather than|instead of|as opposed to|unlike"
    r"|down from|up from|was|previously|originally|formerly)\s+(?:just\s+|the\s+)?[$€£]?\s*$",
    re.IGNORECASE,
)
_OUT_OF = re.compile(
    r"^(?:\s+(?!short|instead|more|less|ahead|because)[A-Za-z]+){0,2}\s+(?:out\s+)?of\s+(?:the\s+|all\s+|a\s+total\s+of\s+|these\s+|her\s+|his\s+)*$"
)
_WORD_BEFORE = re.compile(
    rf"\b(?:{'|'.join(sorted(COUNTING))})\b(?:\s+\w+)?,?\s+(?:to|or|and|plus|minus|times|by|versus|vs|over|(?:out\s+)?of)\s+$"
    r"|[+*/^×÷<>]\s*$",
    re.IGNORECASE,
)
"""A counting word that the one behind it belongs to."""
_ASIDE = re.compile(
    r"\((?=[^()\n]*(?:[=+*×/÷^<>≤≥]|\b(?:since|because|rounded|rejected)\b))[^()\n]{0,120}\)\s*[.!]?\s*$"
)
"""A calculation in brackets at the end."""
_HAS_ASIDE = re.compile(r"\d[^()\d]{0,24}\([^()\n]{0,120}\)\W*$")


def last_number_in(text: str, following: str = "") -> Number | None:
    """Return the number that a text ends with, in digits or words; None without one, or with several.

    `following` is what stands behind the text, which can change what the number says.
    """
    last = next((i for i in range(len(text) - 1, -1, -1) if text[i].isdecimal() or text[i] in "½¼¾⅓⅔"), None)
    if last is None:
        return _said_in(_readable(text[-_WINDOW:] + following[:_TAIL]))
    shown = _readable(text[max(0, last - _WINDOW) : last + _TAIL] + _END_OF_TEXT + following[:_TAIL])
    end = shown.find(_END_OF_TEXT)
    shown = shown.replace(_END_OF_TEXT, "")
    tokens = _without_asides(list(number_tokens(shown)), shown)
    count = len(tokens) if end < 0 else sum(token.start < end for token in tokens)
    if not count:
        return _said_in(shown)
    later = _said_later(shown[tokens[count - 1].end : end if end >= 0 else None])
    return _offered(tokens, count - 1, shown) if later is None else _said_in(later)


def _readable(text: str) -> str:
    """Return plain text without calculations and assurances in brackets, and with one sign for all arrows."""
    if _HAS_ASIDE.search(text):
        text = _ASIDE.sub("", text)
    shown = _SURE_ASIDE.sub("", without_marks(plain(_CALCULATOR.sub("", _TAG.sub(" ", text)))))
    shown = _ENVIRONMENT.sub("\n", shown).replace("&=", "=")
    return _ARROW.sub(lambda found: _meaning_of_arrow(shown[: found.start()]), shown)


def _meaning_of_arrow(before: str) -> str:
    if _VARIABLE_BEFORE.search(before):
        return ">="
    number = _NUMBER_BEFORE.search(before)
    return " to " if number is not None and not number[1] else "="


def _without_asides(tokens: list[NumberToken], shown: str) -> list[NumberToken]:
    """Return the tokens without those that say how sure somebody is of the others."""
    kept: list[NumberToken] = []
    for token in tokens:
        head, tail = shown[max(0, token.start - 64) : token.start], shown[token.end :]
        if not is_assurance(token.number, head, tail) and not (kept and rates_another(head, tail)):
            kept.append(token)
    return kept


def _said_in(text: str) -> Number | None:
    """Return the last number in letters, if its sentence offers it alone. "One" may be a pronoun, but not by itself."""
    for sentence in reversed(re.split(r"[.!?](?=\s|$)|\n|。", text)):
        counting = {word.lower() for word in re.findall(r"[A-Za-z]+", sentence)} & COUNTING
        if not counting:
            continue
        found = last_spelled_out(sentence)
        if found is None or (counting == {"one"} and spelled_out(sentence) is None):
            return None
        head, tail = found.head, found.tail
        number = Number(found.value, percent=_PERCENT.match(tail) is not None)
        if is_assurance(number, head, tail):
            return None
        offered = hedge_around(head, tail) is None and not is_changed(head, tail) and not _WORD_BEFORE.search(head)
        return number if offered and not re.match(r"\s*[+*/^×÷=<>]", tail) else None
    return None


def _said_later(tail: str) -> str | None:
    """Return the words behind the last digits that state a number in letters."""
    found = re.search(
        r"\b(?:is|are|be|equals|gives|makes|gets?|has|have|exactly)\s+(?:about\s+)?([A-Za-z]+)\b", tail, re.IGNORECASE
    )
    return tail if found is not None and found[1].lower() in COUNTING - {"one"} else None


def _offered(tokens: list[NumberToken], place: int, shown: str, depth: int = 0) -> Number | None:
    """Return the number at `place`, if its sentence offers it and no other one."""
    token = tokens[place]
    before = tokens[place - 1] if place else None
    if before is not None and depth < _MAX_PARTS:
        between = shown[before.end : token.start]
        if _CONTRAST.match(between):
            return _offered(tokens, place - 1, shown, depth + 1)
        if _OUT_OF.match(between) and token.number is not None:
            return _part_of(_offered(tokens, place - 1, shown, depth + 1), token.number)
    number = None if _ITEMS.search(shown[: token.end]) else _read(token, shown)
    if number is None or (before is not None and _are_joined(before, token, shown)):
        return None
    after = tokens[place + 1] if place + 1 < len(tokens) and not depth else None
    if after is not None:
        of = number.percent and _OUT_OF.match(shown[token.end : after.start])
        return None if of or _are_joined(token, after, shown) else number
    return number


def _are_joined(first: NumberToken, second: NumberToken, shown: str) -> bool:
    """Return whether two numbers in a row are parts of one statement; the same number twice is not."""
    line = shown[shown.rfind("\n", 0, second.start) + 1 :].split("\n", 1)[0]
    if _ROW.match(line) and "\n" not in shown[first.end : second.start]:
        return False  # cells of a table
    head = signed(shown[: second.start])[0]
    between = head[first.end :]
    if not joins(shown[: first.start], between, shown[second.end :]):
        return False
    same = first.number is not None and second.number is not None and _is_same(first.number, second.number, between)
    signs = [signed(shown[: token.start])[1] for token in (first, second)]
    same = same and signs[0] == signs[1]
    return not same or _OPERATION.search(between) is not None


def _is_same(first: Number, second: Number, between: str) -> bool:
    """Return whether two numbers are one: 18 and 18.0, 1/2 and 50 %, 17.6 and about 18."""
    values = [number.value / 100 if number.percent else number.value for number in (first, second)]
    rounded = "~" in between and first.value.denominator != 1 and abs(values[0] - values[1]) <= Fraction(1, 2)
    return values[0] == values[1] or rounded


def _part_of(part: Number | None, whole: Number) -> Number | None:
    """Return 18 for "18 of 20": not for "18 % of 20", which is to be calculated."""
    if part is None or part.percent or part.computed or part.value.denominator != 1:
        return None
    return part._replace(others=(*part.others, whole.value))


def _read(token: NumberToken, shown: str) -> Number | None:
    """Return the number of a token as the words around it leave it."""
    tail = shown[token.end :]
    head, negative, bullet = signed(shown[: token.start])
    worded = re.search(r"\b(?:minus|negative)\s+[$€£]?$", head, re.IGNORECASE)
    if worded is not None and not negative:
        head, negative = head[: worded.start()], True
    number = token.number
    if (
        number is None
        or _is_operand(head, tail, shown, token)
        or _POINT.search(shown[max(0, token.start - 4) : token.end + 4])
    ):
        return None
    start = max((found.end() for found in _SENTENCE_START.finditer(head)), default=0)
    end = _SENTENCE_END.search(tail)
    sentence = tail if end is None else tail[: end.start()]
    if is_changed(head, sentence) or is_contradicted_in_letters(number, head, tail):
        return None
    hedge = hedge_around(head[start:], sentence)
    if hedge == "wrong":
        return None
    number = number._replace(bound=hedge == "bound", unit=unit_of(head, tail))
    if not negative:
        return number
    if bullet:
        return number._replace(others=(*number.others, -number.value))
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))


def _is_operand(head: str, tail: str, shown: str, token: NumberToken) -> bool:
    line_start = shown.rfind("\n", 0, token.start) + 1
    if _ROW.match(shown[line_start:].split("\n", 1)[0]):
        return operator_before(head.rstrip("| ")) or operator_after(tail.split("|", 1)[0])
    if _BULLET.search(head):
        return operator_after(tail)
    if re.search(r"(?:[≥≤]|>=|<=|=<|\\geq?|\\leq?)[\s$]*$", head):
        return operator_after(tail)  # a bound
    return operator_before(head) or (operator_after(tail) and re.match(r"\s*\+(?!\s*[\w(-])", tail) is None)
