"""Reads the surroundings of a number: its sign, its unit, an operator, a denial."""

# ruff: noqa: RUF001 - these characters are what is read

import re

from lachesis.pipeline.scorer.answers.latex import NARROW

__all__ = ["is_changed", "operator_after", "operator_before", "signed", "unit_of", "without_marks"]

_MARKS = re.compile(r"(?<![\w*])\*{1,3}(?=\S)|(?<=\S)\*{1,3}(?![\w*])|(?<!\w)_{2}(?=\S)|(?<=\S)_{2}(?!\w)")
_ATTACHED_UNITS = frozenset({
    "m", "g", "s", "L", "cm", "mm", "km", "nm", "µm", "kg", "mg", "lb", "lbs", "oz",
    "ft", "in", "yd", "mi", "mph", "kph", "hr", "hrs", "sec", "min", "ml", "mL", "cL", "gal",
    "Hz", "kHz", "MHz", "GHz", "kW", "MW", "GB", "MB", "kB", "TB", "kJ", "Pa", "kPa", "mol",
    "rad", "deg", "cc", "am", "pm", "st", "nd", "rd", "th", "USD", "EUR", "GBP", "CNY", "RMB",
})  # fmt: skip
_LONE_UNITS = _ATTACHED_UNITS | frozenset({"h", "J", "N", "W", "V", "A", "K", "C", "F", "l", "t", "a", "I", "yr"})
_ENDS_ALIKE = {"meters": "m", "meter": "m", "metres": "m", "metre": "m", "centimeters": "cm", "centimetres": "cm",
    "kilometers": "km", "kilometres": "km", "millimeters": "mm", "inches": "in", "inch": "in", "feet": "ft",
    "foot": "ft", "seconds": "s", "second": "s", "sec": "s", "minutes": "min", "minute": "min", "hours": "h",
    "hour": "h", "hr": "h", "hrs": "h", "grams": "g", "gram": "g", "kilograms": "kg", "kilogram": "kg",
    "dollars": "$", "dollar": "$", "usd": "$", "euros": "€", "euro": "€", "eur": "€", "pence": "p", "cents": "¢",
    "cent": "¢", "days": "day",
    "weeks": "week", "months": "month", "years": "year", "degrees": "°", "degree": "°", "radians": "rad",
    "liters": "L", "litres": "L", "l": "L", "miles": "mi", "mile": "mi", "yards": "yd", "yard": "yd"}  # fmt: skip
_KNOWN_UNITS = frozenset(_ENDS_ALIKE.values()) | {"kg", "mg", "ml", "km", "cm", "mm", "lb", "oz", "£", "¥"}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
_UNIT = re.compile(
    rf"[\s{NARROW}]*(?:(?P<before>square|sq|cubic|cu)\.?\s*(?=[A-Za-z]))?(?P<unit>[$€£¥¢°]|[A-Za-zµ]+)"
    r"(?:\s*\^?\s*\{?\s*(?P<power>[1-4])(?!\d)\s*\}?|\s+(?P<after>squared|cubed)\b)?"
    r"(?:\s*(?:/|\bper\b)\s*(?P<per>[A-Za-zµ]+)(?:\s*\^?\s*\{?\s*(?P<per_power>[2-4])\s*\}?)?)?"
)
_FURTHER_UNIT = re.compile(r"\s*[×*]?\s*[A-Za-z]{1,3}\s*\^")
"""m s^{-1}"""
_CURRENCIES = frozenset("$€£¥¢")
_ADVERB = r"(?:be|equal|to|exactly|just|simply|necessarily|quite|even|really|always|only|yet|actually|merely)"
_CHANGED_BEFORE = re.compile(
    rf"(?:\b(?:not|never|cannot|instead of|rather than|unlike)(?:\s+{_ADVERB})*"
    rf"|\w+n't(?:\s+{_ADVERB})*"
    r"|\b(?:twice|thrice|double|triple|half|divisible by|(?:half|third|quarter|square|cube|(?:square|cube) root|log"
    r"|factorial|logarithm|reciprocal|inverse|opposite|multiples?|divisors?|digits) of))[^\w:=]*$",
    re.IGNORECASE,
)
"""Words right before a number by which another number is meant, or this one is denied."""
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~")
_NEAR = 64
"""Characters before a number in which such words end."""
_CHANGED_AFTER = re.compile(
    r"^[\s-]*(?:ten|hundred|thousand|million)ths?\b"
    r"|^\s*(?:squared|cubed|factorial)\b|^\s*(?:st|nd|rd|th)\s+(?:prime|term|power|root|multiple)\b"
    r"|^\W*and[\s-](?:an?\s+|a-|one\s+|two\s+|three\s+)?(?:half|thirds?|quarters?|fourths?|fifths?)\b"
    r"|^\W*(?:is|was)\s+(?:wrong|incorrect|false|not\s+(?:it|right|correct|the answer))\b",
    re.IGNORECASE,
)


def without_marks(text: str) -> str:
    """Return a text without bold and italics, and without what is struck out."""
    return _MARKS.sub("", _STRUCK.sub("", text))


def is_changed(head: str, tail: str) -> bool:
    """Return whether words around a number deny it, or make another one of it."""
    return _CHANGED_BEFORE.search(head[-_NEAR:]) is not None or _CHANGED_AFTER.search(tail) is not None


def signed(head: str) -> tuple[str, bool, bool]:
    """Return what comes before the sign of a number, whether it is negative, and if it may be a bullet."""
    found = re.search(rf"([-+])([ {NARROW}]*)(?:(?:US)?[$€£¥₹])?[ {NARROW}]*$", head)
    if found is None:
        return head, False, False
    before = head[: found.start()]
    if re.search(r"[\w)}\]%°]\s?$", before) and not re.search(r"[^\W\d_]{2,}\s$", before):
        return head, False, False  # an operator, or a hyphen
    bullet = before.endswith("\n") or bool(re.search(r"[^\W\d_]{2,}\s$", before))
    return before, found[1] == "-", bullet and bool(found[2])


def operator_before(head: str) -> bool:
    before = head.rstrip(f" {NARROW}$€£¥₹(~")
    if re.search(r"\d(?::|\s+:\s*)$|(?<![A-Za-z])[A-Za-z]\($", head):  # a ratio, a time; f(18)
        return True
    return bool(
        re.search(r"[-+*×/^<>≤≥≠±√∛∜\\|]$|\\not\s*=$|=/=$|\\(?:div|pm|mp|neq?|leq?|geq?|lt|gt|sqrt|in)$|!=$", before)
    )


def operator_after(tail: str) -> bool:
    if re.match(r"\s*(?:[*×/^+±√<>≤≥π∞|]|\\(?!(?:ldots|dots|quad))|:\s*\d|[_{(\[]\s*\w)", tail):
        return not re.match(r"\s*/\s*[A-Za-z]{2,}|\s*/\s*[hsd]\b|\s+[(\[][^\d]*[)\]]|\s*\*\s*$|\s*[<|]", tail)
    if re.match(r"\s*-\s*$|\s*-\s*[\d(\\]|-[A-Za-z](?![A-Za-z'])|\s-\s[A-Za-z](?![A-Za-z'])", tail):
        return True
    attached = re.match(r"[^\W\d_]+", tail)
    if attached is not None:
        if re.match(r"h(?!\s*\d)", tail):
            return False  # 18h, and not 18h30
        return len(attached[0]) < 3 and attached[0].isascii() and attached[0] not in _ATTACHED_UNITS
    lone = re.match(r"\s+([A-Za-z])(?![A-Za-z']|\.[A-Za-z])", tail)
    return lone is not None and lone[1] not in _LONE_UNITS


def unit_of(head: str, tail: str) -> str:
    """Return the unit in one spelling, "" where none is known."""
    symbol = re.search(r"[$€£¥]\s*$", head)
    if symbol is not None:
        return symbol[0].strip()
    found = _UNIT.match(tail)
    if found is None or _FURTHER_UNIT.match(tail, found.end()):
        return ""
    unit, rest = _known_unit(found["unit"]), ""
    power = _POWERS.get((found["before"] or found["after"] or "").lower(), found["power"] or "1")
    if found["per"] is not None and unit not in _CURRENCIES:  # 18 dollars, and 18 dollars per day
        below = _known_unit(found["per"])
        rest = f"/{below}{found['per_power'] or ''}" if below else "/"
    return f"{unit}{'' if power == '1' else power}{rest}" if unit and rest != "/" else ""


def _known_unit(word: str) -> str:
    unit = _ENDS_ALIKE.get(word.lower(), word)
    return unit if unit in _KNOWN_UNITS else ""
