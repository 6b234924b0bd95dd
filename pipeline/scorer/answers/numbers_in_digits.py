"""Finds the numbers in plain text: digits with separators, fractions, powers, repeating decimals.

Values are exact, and bounded in size before they are computed.
"""

# ruff: noqa: RUF001 - these characters are what is read

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from lachesis.pipeline.scorer.answers.latex import NARROW

__all__ = ["Number", "NumberToken", "number_tokens"]

_MAX_DIGITS = 400
_MAX_EXPONENT = 400
_MAX_POWER_BITS = 4096

_RUN = rf"(?:\d+(?:(?:[.,'_{NARROW}]|[ ](?=\d\d\d(?!\d)))\d+)*|(?<!\d)\.\d+)"
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "lakh": 10**5, "crore": 10**7, "mn": 10**6, "bn": 10**9, "十": 10, "百": 10**2, "千": 10**3,
    "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8,
    "mille": 10**3, "mil": 10**3, "tausend": 10**3, "тысяч": 10**3, "тысячи": 10**3, "тыс": 10**3,
    "millions": 10**6, "millones": 10**6, "millón": 10**6, "milhões": 10**6, "milioni": 10**6, "millionen": 10**6,
    "миллионов": 10**6, "миллиона": 10**6, "миллион": 10**6, "млн": 10**6, "mrd": 10**9, "milliarden": 10**9,
    "milliards": 10**9, "миллиардов": 10**9, "млрд": 10**9,
}  # fmt: skip
_SCALE_NAMES = "|".join(sorted((name for name in _SCALES if len(name) > 1), key=len, reverse=True))
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
      | \s*(?:[*×]|[xX](?=\s*10\s*(?:\^|\*\*)))\s*10\s*(?:\^|\*\*)
        \s*(?P<ten>\{{?\s*[-+]?\s*\d+\s*\}}?|\(\s*[-+]?\d+\s*\))
      | \s*(?:\^|\*\*)\s*(?P<power>\{{\s*[-+]?\s*\d+\s*\}}|\(\s*[-+]?\d+\s*\)|[-+]?\d+)
      | \s*/\s*(?P<below>{_RUN})
      | (?:\s+|\s+and\s+)(?P<part>\d+)\s*/\s*(?P<whole>\d+)
    )?
    (?:\s*(?P<percent>%|(?:percent|per\ cent|pct)(?![A-Za-z]))
      | [\s-]*(?P<scale>(?:{_SCALE_NAMES})(?!\w)|[十百千][万萬亿億]?|[万萬亿億]))?
    """,
    re.VERBOSE | re.IGNORECASE,
)
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
_NEAR = 8
_PART_OF_NAME = re.compile(r"[A-Za-zÀ-ɏΑ-ω](?:_|\s?[\^_]\s?[{(]?\s?[-+]?)?\Z")
"""x2, x_2, cm^2, s^{-1}"""


class Number(NamedTuple):
    """What was read. `others`: what the same characters mean by another convention, or at another place of the text."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    computed: bool = False
    """Whether it is written as an operation: a power, or a quotient that is a whole number."""
    others: tuple[Fraction, ...] = ()
    bound: bool = False
    """Whether it is said to be at most, or at least, that."""


class NumberToken(NamedTuple):
    number: Number | None
    """None: digits that are no number, a list or a date say."""
    start: int
    end: int


def number_tokens(text: str) -> Iterator[NumberToken]:
    """Yield the numbers of a plain text; not the digits of names and of the exponents of units."""
    at = 0
    while (found := _NUMBER.search(text, at)) is not None:
        start, at = found.span()
        if _PART_OF_NAME.search(text[max(0, start - _NEAR) : start]):
            continue
        yield NumberToken(_value_of(found), start, at)


def _value_of(found: re.Match[str]) -> Number | None:
    read = _numeral(found["run"])
    if read is None:
        return None
    value, others = read
    repeated = _repeating(found)
    if repeated is None and (found["overline"] or found["brackets"] or found["dots"]):
        return None
    if repeated is not None:
        value, others = repeated, ()
    if found["power"]:
        return _power(value, _integer(found["power"]))
    factor = _factor(found)
    if factor is None:
        return None
    if found["part"]:
        if not int(found["whole"]) or value.denominator != 1:
            return None
        value, others = value + Fraction(int(found["part"]), int(found["whole"])), ()
    if found["scale"]:
        scale = found["scale"].lower()
        factor *= _SCALES[scale] if scale in _SCALES else _SCALES[scale[0]] * _SCALES[scale[1]]
    return Number(
        value * factor,
        percent=bool(found["percent"]),
        computed=bool(found["below"]) and (value * factor).denominator == 1,
        others=() if found["below"] else tuple(other * factor for other in others),
    )


def _factor(found: re.Match[str]) -> Fraction | None:
    """Return what the digits are multiplied by: a power of ten, or 1 / what they are divided by."""
    if found["e"] or found["ten"]:
        exponent = _integer(found["e"] or found["ten"])
        return Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None
    if found["below"]:
        below = _numeral(found["below"])
        return 1 / below[0] if below is not None and below[0] else None
    return Fraction(1)


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
    if not (found["overline"] or found["brackets"] or found["dots"] or found["ongoing"]):
        return None
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
    return (
        Fraction(int(whole or "0"))
        + int(decimals or "0") * shift
        + shift * Fraction(int(period), 10 ** len(period) - 1)
    )


def _power(base: Fraction, exponent: int) -> Number | None:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if not base or abs(exponent) * bits > _MAX_POWER_BITS:
        return None
    return Number(base**exponent, computed=base != 10)


def _integer(text: str) -> int:
    digits = re.sub(r"[^\d-]", "", text)
    return int(digits) if len(digits) <= 6 else (_MAX_EXPONENT + 1) * _MAX_POWER_BITS
