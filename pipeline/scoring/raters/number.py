"""Reads numbers as people and models write them: the one number that an answer holds, or the last one of a text.

Guarantees that nothing is read from what might be an expression, a list, a range or a bound: an answer of several
numbers or with an operator is None. Values are exact, and bounded in size before they are computed.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from lachesis.pipeline.scoring.raters.latex import NARROW, plain
from lachesis.pipeline.scoring.raters.number_words import spelled_out

__all__ = ["Number", "is_hedged", "last_number_in", "read_number"]

_MAX_DIGITS = 400
_MAX_EXPONENT = 400
_MAX_POWER_BITS = 4096
_WINDOW = 2048
"""Characters before the last digit of a text in which its last number is looked for."""
_MAX_ANSWER_CHARS = 2048

_RUN = rf"(?:\d+(?:(?:[.,'_{NARROW}]|[ ](?=\d\d\d(?!\d)))\d+)*|(?<!\d)\.\d+)"
_NUMBER = re.compile(
    rf"""
    (?P<run>{_RUN})
    (?:
        (?P<overline>\.?\\(?:overline|bar)\s*\{{(?P<period>\d+)\}})
      | (?P<dots>\.?(?:\\dot\s*\{{?\d\}}?\d*){{1,2}})
      | (?P<brackets>\.?\((?P<bracketed>\d+)\))
      | (?P<ongoing>\s?(?:\.\.\.|…|\\[lc]?dots))
    )?
    (?:
        [eE](?P<e>[-+]?\d{{1,5}})(?![\d.]|[A-Za-z])
      | \s*(?:[*×]|[xX](?=\s*10\s*(?:\^|\*\*)))\s*10\s*(?:\^|\*\*)\s*(?P<ten>\{{?\s*[-+]?\s*\d+\s*\}}?|\(\s*[-+]?\d+\s*\))
      | \s*(?:\^|\*\*)\s*(?P<power>\{{\s*[-+]?\s*\d+\s*\}}|\(\s*[-+]?\d+\s*\)|[-+]?\d+)
      | \s*/\s*(?P<below>{_RUN})
      | (?:\s+|\s+and\s+)(?P<part>\d+)\s*/\s*(?P<whole>\d+)
    )?
    (?:\s*(?P<percent>%|(?:percent|per\ cent|pct)(?![A-Za-z]))
      | \s*(?P<scale>(?:hundred|thousand|million|billion|trillion)(?![A-Za-z])|[万萬亿億]))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
}  # fmt: skip
_GROUPED = [
    re.compile(r"(?P<whole>[1-9]\d{0,2}(?:,\d{3})+)(?:\.(?P<decimals>\d+))?"),
    re.compile(r"(?P<whole>\d{1,2}(?:,\d{2})+,\d{3})(?:\.(?P<decimals>\d+))?"),
    re.compile(r"(?P<whole>\d{1,3}(?:\.\d{3})+),(?P<decimals>\d+)"),
    re.compile(r"(?P<whole>\d{1,3}(?:\.\d{3}){2,})(?P<decimals>)"),
    re.compile(rf"(?P<whole>\d{{1,3}}(?:(?:{NARROW}\d{{3}})+|(?: \d{{3}})+|(?:'\d{{3}})+))(?:[.,](?P<decimals>\d+))?"),
    re.compile(r"(?P<whole>\d{1,3}(?:_\d{3})+)(?:\.(?P<decimals>\d+))?"),
    re.compile(r"(?P<whole>\d*)\.(?P<decimals>\d+)"),
    re.compile(r"(?P<whole>\d+),(?P<decimals>\d+)"),
    re.compile(r"(?P<whole>\d+)(?P<decimals>)"),
]
_MARKS = re.compile(r"(?<![\w*])\*{1,3}(?=\S)|(?<=\S)\*{1,3}(?![\w*])|(?<!\w)_{2}(?=\S)|(?<=\S)_{2}(?!\w)")
_NEAR = 8
_PART_OF_NAME = re.compile(r"[A-Za-zÀ-ɏΑ-ω](?:_|\s?[\^_]\s?[{(]?\s?[-+]?)?$")
"""x2, x_2, cm^2, s^{-1}"""
_ENDING = re.compile(r"(?<![.])[.,;:。]$")
_NAME = re.compile(
    r"\s*+(?:\\?[A-Za-z]++(?:\s*+_\s*+(?:\{\s*+\w++\s*+\}|\w))?'*+\s*+)++(?:\([-\w\s,=.]*+\))?\s*+"
)
_COMMAND = re.compile(r"\\(?!(?:alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|angle|triangle|therefore)(?![a-z]))")
_RELATION = re.compile(r"\s*(?:(?<![<>!])=|~)\s*")
_ATTACHED_UNITS = frozenset(
    "m g s L cm mm km nm µm kg mg lb lbs oz ft in yd mi mph kph hr hrs sec min ml mL cL gal Hz kHz MHz GHz kW MW GB MB "
    "kB TB kJ Pa kPa mol rad deg cc am pm st nd rd th USD EUR GBP CNY RMB".split()
)
_LONE_UNITS = _ATTACHED_UNITS | frozenset("h J N W V A K C F l t a I yr".split())
_ENDS_ALIKE = {"meters": "m", "meter": "m", "metres": "m", "metre": "m", "centimeters": "cm", "centimetres": "cm",
    "kilometers": "km", "kilometres": "km", "millimeters": "mm", "inches": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "seconds": "s", "sec": "s", "minutes": "min", "minute": "min", "hours": "h", "hour": "h", "hr": "h",
    "hrs": "h", "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg", "dollars": "$", "dollar": "$",
    "usd": "$", "euros": "€", "euro": "€", "eur": "€", "pence": "p", "cents": "¢", "cent": "¢", "days": "day",
    "weeks": "week", "months": "month", "years": "year", "degrees": "°", "degree": "°", "radians": "rad",
    "liters": "L", "litres": "L", "l": "L", "miles": "mi", "mile": "mi", "yards": "yd", "yard": "yd"}  # fmt: skip
_KNOWN_UNITS = frozenset(_ENDS_ALIKE.values()) | {"kg", "mg", "ml", "km", "cm", "mm", "lb", "oz", "£", "¥"}
_BOUND_BEFORE = re.compile(
    r"(?:\bthan|\bat (?:least|most)|\bup to|\b(?:over|under|above|below|nearly|almost|between|exceeds?|exceeding|beyond|"
    r"within|until|every|root of|sum of|product of|of either))\W*$",
    re.IGNORECASE,
)
_BOUND_AFTER = re.compile(
    r"^\W*(?:\w+\s+)?(?:more|less|fewer|greater|larger|smaller|higher|lower|other)\s+than\b|^\W*(?:or|and)\s+(?:more|less|fewer|greater|larger|smaller|higher|lower|above|below|over|under|beyond|up|another)"
    r"\b|\b(?:squared|cubed|factorial|times|plus|minus|divided|multiplied|raised|to the power|is wrong|incorrect)\b",
    re.IGNORECASE,
)
_NEGATION = re.compile(
    r"\b(?:not|never|neither|nor|cannot|either|unless|no longer|except|without|\w+n't)\b|\bor\s*$|^\s*(?:or|and|to)\s*$",
    re.IGNORECASE,
)
_LISTED = re.compile(r",(?!\d{3}(?!\d))|;")
_POINT = re.compile(r"[(\[][^()\[\]]*\d(?:,(?!\d{3}(?!\d))|;)[^()\[\]]*[)\]]")
_HEDGE = re.compile(
    r"\b(?:not|never|neither|nor|either|or|between|at (?:least|most)|up to|(?:more|less|fewer|greater|smaller|other) than)\b"
    r"|\b\w+n't\b",
    re.IGNORECASE,
)
_FOREIGN = re.compile(r"[*×/^+<>≤≥≠|&!=±√∑∫π∞\\{}\[\]]")
_UNIT_TAIL = re.compile(
    r"[\s-]*(?:[A-Za-zµΩ°]+\.?)(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?"
    r"(?:\s*(?:[/*×]|per)\s*[A-Za-z]+(?:\s*\^?\s*(?:\{\s*-?\d\s*\}|-?\d(?!\d)))?)*"
)
_WORD = re.compile(r"[^\W\d_]+")


class Number(NamedTuple):
    """What was read. `others`: what the same characters mean by another convention, or at another place of the text."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    computed: bool = False
    """Whether it is written as an operation: a power, or a quotient that is a whole number."""
    others: tuple[Fraction, ...] = ()


class _Token(NamedTuple):
    number: Number | None
    """None: digits that are no number, a list or a date say."""
    start: int
    end: int


def read_number(text: str) -> Number | None:
    """Return the number that a short answer holds, in digits or in words; None where it is not one number alone."""
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    shown = _ENDING.sub("", _without_marks(plain(text)).strip(" \t\r\n~"))
    side = _right_side(_unbracketed(shown))
    if side is None:
        return None
    shown = _unbracketed(side)
    tokens = list(_tokens(shown))
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
    tokens = list(_tokens(shown))
    if not tokens:
        return None
    token = tokens[-1]
    head, tail = shown[: token.start], shown[token.end :]
    head, negative, bullet = _signed(head)
    if token.number is None or _operator_before(head) or _operator_after(tail):
        return None
    number = token.number
    if not negative:
        return number
    if bullet:
        return number._replace(others=(*number.others, -number.value))
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))


def _without_marks(text: str) -> str:
    return _MARKS.sub("", text)


def _right_side(text: str) -> str | None:
    """Return what stands beside the equals signs, if all else are names; None if it is an equation."""
    sides = _RELATION.split(text)
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _COMMAND.search(sides[1]):
        sides.reverse()  # 18 = x
    for side in sides[:-1]:
        if side and (not _NAME.fullmatch(side) or _COMMAND.search(side)):
            return None
    return sides[-1].strip()


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the numbers of a plain text; not the digits of names and of the exponents of units."""
    at = 0
    while (found := _NUMBER.search(text, at)) is not None:
        start, at = found.span()
        if _PART_OF_NAME.search(text[max(0, start - _NEAR) : start]):
            continue
        yield _Token(_value_of(found), start, at)


def _value_of(found: re.Match[str]) -> Number | None:
    read = _numeral(found["run"])
    if read is None:
        return None
    value, others = read
    if found["overline"] or found["brackets"] or found["dots"] or found["ongoing"]:
        repeated = _repeating(found)
        if repeated is None and not found["ongoing"]:
            return None
        if repeated is not None:
            value, others = repeated, ()
    factor = Fraction(1)
    if found["e"] or found["ten"]:
        exponent = _integer(found["e"] or found["ten"])
        if abs(exponent) > _MAX_EXPONENT:
            return None
        factor = Fraction(10) ** exponent
    elif found["power"]:
        return _power(value, _integer(found["power"]))
    elif found["below"]:
        below = _numeral(found["below"])
        if below is None or not below[0]:
            return None
        factor, others = 1 / below[0], ()
    elif found["part"]:
        if not int(found["whole"]) or value.denominator != 1:
            return None
        value, others = value + Fraction(int(found["part"]), int(found["whole"])), ()
    if found["scale"]:
        factor *= _SCALES[found["scale"].lower()]
    computed = bool(found["below"]) and (value * factor).denominator == 1 and factor.denominator != 1
    return Number(
        value * factor,
        percent=bool(found["percent"]),
        computed=computed or bool(found["below"] and factor == 1),
        others=tuple(other * factor for other in others),
    )


def _numeral(run: str) -> tuple[Fraction, tuple[Fraction, ...]] | None:
    """Return the value of digits with separators, and what it is by another convention; None if it is none."""
    if sum(map(str.isdigit, run)) > _MAX_DIGITS:
        return None
    for shape in _GROUPED:
        found = shape.fullmatch(run)
        if found is None:
            continue
        whole, decimals = re.sub(r"\D", "", found["whole"]), found["decimals"] or ""
        value = Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))
        if re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", run):
            return value, (value * 1000,)
        if re.fullmatch(r"[1-9]\d{0,2},\d{3}", run):
            return value, (value / 1000,)
        return value, ()
    return None


def _repeating(found: re.Match[str]) -> Fraction | None:
    """Return the value of a decimal that repeats: 0.1\\overline{6}, 0.1\\dot{6}, 0.1(6), 0.666..."""
    run = found["run"]
    if found["overline"] is not None:
        before, period = run + ("." if found["overline"].startswith(".") else ""), found["period"]
    elif found["brackets"] is not None:
        before, period = run + ("." if found["brackets"].startswith(".") else ""), found["bracketed"]
    elif found["dots"] is not None:
        before, period = run + ("." if found["dots"].startswith(".") else ""), re.sub(r"\D", "", found["dots"])
    else:
        ending = re.search(r"(\d{1,6}?)\1\1$|(\d{2,6})\2$", run)
        if ending is None or "." not in run:
            return None
        before, period = run[: ending.start()], ending[1] or ending[2]
    whole, point, decimals = before.partition(".")
    if not point or not (whole + "0").isdigit() or (decimals and not decimals.isdigit()):
        return None
    if len(decimals) + len(period) + len(whole) > _MAX_DIGITS:
        return None
    shift = Fraction(10) ** -len(decimals)
    return Fraction(int(whole or "0")) + int(decimals or "0") * shift + shift * Fraction(int(period), 10 ** len(period) - 1)


def _power(base: Fraction, exponent: int) -> Number | None:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if not base or abs(exponent) * bits > _MAX_POWER_BITS:
        return None
    return Number(base**exponent, computed=base != 10)


def _integer(text: str) -> int:
    digits = re.sub(r"[^\d-]", "", text)
    return int(digits) if len(digits) <= 6 else (_MAX_EXPONENT + 1) * _MAX_POWER_BITS


def _alone(token: _Token, text: str) -> Number | None:
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
    if _BOUND_BEFORE.search(head) or _BOUND_AFTER.search(tail) or _NEGATION.search(head) or _NEGATION.search(tail):
        return None
    words = _WORD.findall(head)
    if words and len(words[-1]) == 1 and words[-1] not in "aI" and not re.search(r"[:,.]\W*$|^\W*[A-J]\W*$", head):
        return None  # x 18: a product
    number = token.number._replace(unit=_unit_of(head, tail))
    if not negative:
        return number
    return number._replace(value=-number.value, others=tuple(-other for other in number.others))


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
    return bool(re.search(r"[-+*×/^<>≤≥≠±√\\|]$|\\(?:div|pm|mp|neq?|leq?|geq?|lt|gt|sqrt|in)$|\d\s*:$|!=$", before))


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
