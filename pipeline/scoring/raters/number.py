"""Reads numbers as people write them: the one that an answer holds, or the last one of a text.

Guarantees that nothing is read from what might be an expression, a list, a range or a bound: an answer of several
numbers or with an operator is None.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re

from lachesis.pipeline.scoring.raters.latex import NARROW, plain
from lachesis.pipeline.scoring.raters.number_words import spelled_out
from lachesis.pipeline.scoring.raters.numerals import Number, NumberToken, number_tokens

__all__ = ["Number", "is_hedged", "last_number_in", "read_number"]

_WINDOW = 2048
"""Characters before the last digit of a text in which its last number is looked for."""
_MAX_ANSWER_CHARS = 2048

_MARKS = re.compile(r"(?<![\w*])\*{1,3}(?=\S)|(?<=\S)\*{1,3}(?![\w*])|(?<!\w)_{2}(?=\S)|(?<=\S)_{2}(?!\w)")
_ENDING = re.compile(r"(?<![.])[.,;:。]$")
_NAME = re.compile(r"\s*+(?:\\?[A-Za-z]++(?:\s*+_\s*+(?:\{\s*+\w++\s*+\}|\w))?'*+\s*+)++(?:\([-\w\s,=.]*+\))?\s*+")
_COMMAND = re.compile(r"\\(?!(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle|triangle|therefore)(?![a-z]))")
_RELATION = re.compile(r"\s*(?:(?<![<>!])=|~)\s*")
_ATTACHED_UNITS = frozenset({
    "m", "g", "s", "L", "cm", "mm", "km", "nm", "µm", "kg", "mg", "lb", "lbs", "oz",
    "ft", "in", "yd", "mi", "mph", "kph", "hr", "hrs", "sec", "min", "ml", "mL", "cL", "gal",
    "Hz", "kHz", "MHz", "GHz", "kW", "MW", "GB", "MB", "kB", "TB", "kJ", "Pa", "kPa", "mol",
    "rad", "deg", "cc", "am", "pm", "st", "nd", "rd", "th", "USD", "EUR", "GBP", "CNY", "RMB",
})  # fmt: skip
_LONE_UNITS = _ATTACHED_UNITS | frozenset({"h", "J", "N", "W", "V", "A", "K", "C", "F", "l", "t", "a", "I", "yr"})
_ENDS_ALIKE = {"meters": "m", "meter": "m", "metres": "m", "metre": "m", "centimeters": "cm", "centimetres": "cm",
    "kilometers": "km", "kilometres": "km", "millimeters": "mm", "inches": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "seconds": "s", "sec": "s", "minutes": "min", "minute": "min", "hours": "h", "hour": "h", "hr": "h",
    "hrs": "h", "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg", "dollars": "$", "dollar": "$",
    "usd": "$", "euros": "€", "euro": "€", "eur": "€", "pence": "p", "cents": "¢", "cent": "¢", "days": "day",
    "weeks": "week", "months": "month", "years": "year", "degrees": "°", "degree": "°", "radians": "rad",
    "liters": "L", "litres": "L", "l": "L", "miles": "mi", "mile": "mi", "yards": "yd", "yard": "yd"}  # fmt: skip
_KNOWN_UNITS = frozenset(_ENDS_ALIKE.values()) | {"kg", "mg", "ml", "km", "cm", "mm", "lb", "oz", "£", "¥"}
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
_CHANGED_BEFORE = re.compile(
    r"(?:\b(?:not|never|cannot|instead of|rather than|unlike)(?:\s+(?:be|equal|to|exactly|just|simply))*"
    r"|\w+n't(?:\s+(?:be|equal|to|exactly|just|simply))*"
    r"|\b(?:twice|thrice|double|triple|half|divisible by|(?:half|third|quarter|square|cube|(?:square|cube) root|log"
    r"|factorial|logarithm|reciprocal|inverse|opposite|multiples?|divisors?|digits) of))[^\w:=]*$",
    re.IGNORECASE,
)
"""Words right before a number by which another number is meant, or this one is denied."""
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
_NEAR = 64
"""Characters before a number in which such words end."""
_CHANGED_AFTER = re.compile(
    r"^\s*(?:squared|cubed|factorial)\b|^\s*(?:st|nd|rd|th)\s+(?:prime|term|power|root|multiple)\b"
    r"|^\W*and (?:an?\s+|one\s+|two\s+|three\s+)?(?:half|thirds?|quarters?|fourths?|fifths?)\b"
    r"|^\W*(?:is|was)\s+(?:wrong|incorrect|false|not\s+(?:it|right|correct|the answer))\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not|never|neither|nor|cannot|either|unless|no longer|except|without|\w+n't)\b"
    r"|\bor\s*$|^\s*(?:or|and|to)\s*$",
    re.IGNORECASE,
)
_LISTED = re.compile(r",(?!\d{3}(?!\d))|;")
_POINT = re.compile(r"[(\[][^()\[\]]*\d(?:,(?!\d{3}(?!\d))|;)[^()\[\]]*[)\]]")
_HEDGE = re.compile(
    r"\b(?:not|never|neither|nor|either|or|between|at (?:least|most)|up to)\b"
    r"|\b(?:more|less|fewer|greater|smaller|other) than\b|\b\w+n't\b",
    re.IGNORECASE,
)
_FOREIGN = re.compile(r"[*×/^+<>≤≥≠|&!=±√∑∫π∞\\{}\[\]]")
_UNIT_TAIL = re.compile(
    r"[\s-]*(?:[A-Za-zµΩ°]+\.?)(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?"
    r"(?:\s*(?:[/*×]|per)\s*[A-Za-z]+(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?)*"
)
_WORD = re.compile(r"[^\W\d_]+")


def read_number(text: str) -> Number | None:
    """Return the number that a short answer holds, in digits or words; None where it is not one alone."""
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    shown = _ENDING.sub("", _without_marks(plain(text)).strip(" \t\r\n~"))
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
    while text[:1] + text[-1:] in {"()", "[]", '""', "''"} and "(" not in text[1:-1] and len(text) > 2:
        if text[0] in "([" and _LISTED.search(text):
            break
        text = text[1:-1].strip()
    return text


def is_hedged(text: str) -> bool:
    """Return whether a text denies, bounds or leaves open what it says."""
    return _HEDGE.search(text) is not None


def last_number_in(text: str) -> Number | None:
    """Return the last number in a text; None if there is none, or it is a part of an expression."""
    last = next((i for i in range(len(text) - 1, -1, -1) if text[i].isdecimal() or text[i] in "½¼¾⅓⅔"), None)
    if last is None:
        return None
    shown = _without_marks(plain(text[max(0, last - _WINDOW) : last + 64]))
    tokens = list(number_tokens(shown))
    if not tokens:
        return None
    token = tokens[-1]
    head, tail = shown[: token.start], shown[token.end :]
    head, negative, bullet = _signed(head)
    if token.number is None or _operator_before(head) or _operator_after(tail) or _is_changed(head, tail):
        return None
    number = token.number
    if not negative:
        return number
    if bullet:
        return number._replace(others=(*number.others, -number.value))
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))


def _without_marks(text: str) -> str:
    return _MARKS.sub("", _STRUCK.sub("", text))


def _right_side(text: str) -> str | None:
    """Return what stands beside the equals signs, if all else are names; None if it is an equation."""
    sides = _RELATION.split(text)
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _COMMAND.search(sides[1]):
        sides.reverse()  # 18 = x
    for side in sides[:-1]:
        if side and (not _NAME.fullmatch(side) or _COMMAND.search(side)):
            return None
    return sides[-1].strip()


def _alone(token: NumberToken, text: str) -> Number | None:
    """Return the only number of a text, if nothing about it changes what it says."""
    head, tail = text[: token.start], text[token.end :]
    head, negative, _ = _signed(head)
    if token.number is None or _operator_before(head) or _operator_after(tail):
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
        _is_changed(head, tail)
        or _BOUND_BEFORE.search(head)
        or _BOUND_AFTER.search(tail)
        or _NEGATION.search(head)
        or _NEGATION.search(tail)
    ):
        return None
    words = _WORD.findall(head)
    if words and len(words[-1]) == 1 and words[-1] not in "aI" and not re.search(r"[:,.]\W*$|^\W*[A-J]\W*$", head):
        return None  # x 18: a product
    number = token.number._replace(unit=_unit_of(head, tail))
    if not negative:
        return number
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))


def _is_changed(head: str, tail: str) -> bool:
    """Return whether words around a number deny it, or make another one of it."""
    return _CHANGED_BEFORE.search(head[-_NEAR:]) is not None or _CHANGED_AFTER.search(tail) is not None


def _signed(head: str) -> tuple[str, bool, bool]:
    """Return what comes before the sign of a number, whether it is negative, and whether the sign may be a bullet."""
    found = re.search(rf"([-+])([ {NARROW}]*)(?:(?:US)?[$€£¥₹])?[ {NARROW}]*$", head)
    if found is None:
        return head, False, False
    before = head[: found.start()]
    if re.search(r"[\w)}\]%°]\s?$", before) and not re.search(r"[^\W\d_]{2,}\s$", before):
        return head, False, False  # an operator, or a hyphen
    bullet = bool(found[2]) and (before.endswith("\n") or not before.strip())
    return before, found[1] == "-", bullet and "\n" in before


def _operator_before(head: str) -> bool:
    before = head.rstrip(f" {NARROW}$€£¥₹(~")
    if re.search(r"\d(?::|\s+:\s*)$", head):  # a ratio, a time
        return True
    return bool(re.search(r"[-+*×/^<>≤≥≠±√\\|]$|\\(?:div|pm|mp|neq?|leq?|geq?|lt|gt|sqrt|in)$|!=$", before))


def _operator_after(tail: str) -> bool:
    if re.match(r"\s*(?:[*×/^+±√<>≤≥π∞|]|\\(?!(?:ldots|dots|quad))|:\s*\d|[_{(\[]\s*\w)", tail):
        return not re.match(r"\s*/\s*[A-Za-z]{2,}|\s*/\s*[hsd]\b|\s+\([^\d]*\)|\s*\*\s*$|\s*[<|]", tail)
    if re.match(r"\s*-\s*$|\s*-\s*[\d(\\]|-[A-Za-z]\b|\s-\s[A-Za-z]\b", tail):
        return True
    attached = re.match(r"[^\W\d_]+", tail)
    if attached is not None:
        return len(attached[0]) < 3 and attached[0].isascii() and attached[0] not in _ATTACHED_UNITS
    lone = re.match(r"\s+([A-Za-z])(?![A-Za-z'])", tail)
    return lone is not None and lone[1] not in _LONE_UNITS


def _unit_of(head: str, tail: str) -> str:
    """Return the unit in one spelling, "" where none is known."""
    symbol = re.search(r"[$€£¥]\s*$", head)
    if symbol is not None:
        return symbol[0].strip()
    found = re.match(rf"[\s{NARROW}]*([$€£¥¢°]|[A-Za-zµ]+)", tail)
    if found is None:
        return ""
    unit = _ENDS_ALIKE.get(found[1].lower(), found[1])
    return unit if unit in _KNOWN_UNITS else ""
