"""Compares two answers of mathematics. Pure; the caller must stop slow comparisons.

Numbers and words are read here, exactly and in microseconds. math-verify compares everything else (expressions, sets,
intervals, matrices), after typography is replaced, and only where its verdict is known to be right.
"""

import re
from contextlib import suppress
from fractions import Fraction
from typing import Any, Literal

from lachesis.pipeline.scorer.answers.compare_notation import of_one_kind, same_notation
from lachesis.pipeline.scorer.answers.compare_words import are_all_reals, same_choice, same_time, same_words
from lachesis.pipeline.scorer.answers.last_box import boxed, has_box
from lachesis.pipeline.scorer.answers.latex import plain, unwrapped
from lachesis.pipeline.scorer.answers.number_of_short_answer import read_number
from lachesis.pipeline.scorer.answers.numbers_in_digits import Number

__all__ = ["equal", "equal_or_unsure", "is_equation_of_numbers", "reference_answer"]

Verdict = bool | Literal["unsure"] | None
_DOTS = re.compile(r"\\(?:[lc]?dots[cbmio]?)(?![A-Za-z])|\.\.\.|…")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)\s*$")
_MIN_ROUNDED_DECIMALS = 6
_DIGITS = 30
_MAX_ROUNDING = 1e-6
"""Relative difference of constants that were rounded to six decimals or more."""
_NAME = re.compile(r"\s*(\\?[A-Za-z](?:_\w|_\{\w+\})?)\s*=(?!=)")
_BASED = re.compile(r"\s*(\w+?)\s*_\s*\{?\s*(?:\\text\s*\{)?\s*(\d{1,2})[\s}]*")
_JOINED = re.compile(
    r"\\text\s*\{\s*(?:or|and)\s*\}|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\(?:lor|land|vee|wedge)(?![A-Za-z])"
)
_CONNECTIVES = {"lor": "or", "vee": "or", "land": "and", "wedge": "and", "\u2228": "or", "\u2227": "and"}
_PLUS_MINUS = re.compile(r"\A((?:(?!\\pm)[^=,;])*)\\pm(?![A-Za-z])((?:(?!\\pm)[^=,;])*)\Z", re.DOTALL)
_ASSIGNED = re.compile(r"\A\s*[A-Za-z]\s*=(?=[^=]*(?:\\pm|(?<![A-Za-z\\_])i)(?![A-Za-z])[^=]*\Z)")
"""The name before a value that is of two signs, or complex."""
_CONNECTIVE = re.compile(r"(?:(?<=\\)(?:lor|vee|land|wedge)(?![A-Za-z])|[\u2227\u2228])")


def reference_answer(text: str) -> str:
    """Return the answer in a reference: what its box or its "#### " holds, where it is a whole solution."""
    if has_box(text):
        return boxed(text) or text
    marked = _HASHES.search(text)
    return marked[1].strip() if marked is not None else text


def equal(gold: str, given: str) -> bool | None:
    """Return whether two answers say the same, in LaTeX or plain; None if the reference is unreadable.

    A reference that is a number is equal to numbers alone: else "3+4" would pass for 7, and with it the task of finding
    it. There is no time limit: the caller kills the process, so that slowness is never taken for a wrong answer.
    """
    known = equal_or_unsure(gold, given)
    return _verified(gold, given) if known == "unsure" else known


def equal_or_unsure(gold: str, given: str) -> Verdict:
    """Return what can be said without computer algebra, "unsure" where it takes that."""
    if gold == given and gold.strip():
        return True
    gold, given = _undelimited(gold), _undelimited(given)
    if not gold or not given:
        return False if gold else None
    return True if gold == given else _compared(gold, given)


def _compared(gold: str, given: str) -> Verdict:
    if _DOTS.search(gold) or _DOTS.search(given):
        gold, given = (_DOTS.sub(r"\\dots", re.sub(r"\s", "", text)) for text in (gold, given))
        if read_number(gold) is None:
            return gold == given  # how a sequence goes on is not compared
    for compare in (_same_digits, same_time, same_choice, are_all_reals):
        known = compare(gold, given)
        if known is not None:
            return known
    expected = _number_meant(gold)
    if expected is not None:
        return _against_number(expected, gold, given)
    words = same_words(gold, given)
    return "unsure" if words is None else words


def _undelimited(text: str) -> str:
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inner = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and len(text) > 2 * len(opening) and "$" not in inner:
            return inner.strip()
    return text


def _same_digits(gold: str, given: str) -> bool | None:
    """Return whether two numbers are the same in a base that one of them names, None where none does."""
    bases = _BASED.fullmatch(gold), _BASED.fullmatch(given)
    if not any(found is not None and found[1][:1].isdigit() for found in bases):
        return None
    digits = [text.strip() if found is None else found[1] for text, found in zip((gold, given), bases, strict=True)]
    named = {found[2] for found in bases if found is not None}
    return digits[0] == digits[1] and len(named) == 1


def _number_meant(gold: str) -> Number | None:
    """Return the number that a reference is; a comma between digits that group no thousands separates a list."""
    number = read_number(gold)
    listed = re.search(r"\d,\d", plain(gold)) and not re.search(r"\d,\d{3}(?!\d)|\d\.\d{3},\d", plain(gold))
    return None if listed and not re.search(r"(?<!\d)0,\d", plain(gold)) else number


def _against_number(expected: Number, gold: str, given: str) -> Verdict:
    answer = read_number(given)
    if answer is not None:
        names = _NAME.match(gold), _NAME.match(given)
        if names[0] is not None and names[1] is not None and names[0][1] != names[1][1]:
            return False
        return _same_number(expected, answer)
    if is_equation_of_numbers(given):
        sides = given.split("=")
        last = read_number(sides[-1])
        return "unsure" if last is not None and _same_number(expected, last) else False
    lone = plain(given).strip("\\{}[]() .")  # {18}, [18]
    return "unsure" if lone.replace(".", "", 1).isdigit() else False


def is_equation_of_numbers(text: str) -> bool:
    """Return whether an answer is an equation without names, 12 + 6 = 18 say."""
    return "=" in text and not re.search(
        r"[^\W\d_]", re.sub(r"\\(?:times|cdot|[dt]?frac|div|left|right|sqrt)", "", text)
    )


def _same_number(expected: Number, answer: Number) -> bool:
    if answer.computed and not expected.computed:
        return False
    units = tuple("%" if number.percent else number.unit for number in (expected, answer))
    if all(units) and units[0] != units[1]:
        return False
    if _same_value(expected.value, answer.value):
        return True
    if expected.percent == answer.percent:
        return False
    return _same_value(expected.value / (100 if expected.percent else 1), answer.value / (100 if answer.percent else 1))


def _same_value(expected: Fraction, answer: Fraction) -> bool:
    """Return whether values are the same; a decimal of six places or more stands for the fraction it rounds."""
    if expected == answer:
        return True
    places = _decimal_places(expected), _decimal_places(answer)
    if (places[0] is None) == (places[1] is None):
        return False
    decimals = places[0] if places[0] is not None else places[1]
    return (
        decimals is not None
        and decimals >= _MIN_ROUNDED_DECIMALS
        and abs(expected - answer) < Fraction(1, 10**decimals)
    )


def _decimal_places(value: Fraction) -> int | None:
    """Return the decimals that write a value exactly, None if no number of them does."""
    rest, twos, fives = value.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def _verified(gold: str, given: str) -> bool | None:
    """Return math-verify's verdict, where the two answers are of one kind."""
    from math_verify import verify

    connectives = [{_CONNECTIVES[sign] for sign in _CONNECTIVE.findall(text)} for text in (gold, given)]
    if all(connectives) and connectives[0] != connectives[1]:
        return False
    gold, given = (_listed(unwrapped(_undelimited(text))) for text in (gold, given))
    if is_equation_of_numbers(given) and read_number(gold) is not None:
        texts = given.split("=")
    else:
        gold, given = same_notation(gold, given)
        if not of_one_kind(gold, given):
            return False
        texts = [given]
    expected = _parsed(gold)
    if not expected:
        return None
    for text in texts:
        answer = _parsed(text)
        if not verify(expected, answer, timeout_seconds=None) or _apart(expected[0], answer[0]):
            return False
    return True


def _parsed(text: str) -> list[Any]:
    """Return what math-verify reads. Its "i" is one letter or another by the place where it stands: here, sympy's i."""
    from math_verify import parse
    from sympy import Basic, I  # type: ignore[import-untyped]

    found = parse(f"${_PLUS_MINUS.sub(_both, _ASSIGNED.sub('', text))}$", parsing_timeout=None)
    with suppress(ValueError):  # an interval with an end that is no number of the line
        return [
            one.subs({name: I for name in one.free_symbols if name.name == "i"}) if isinstance(one, Basic) else one
            for one in found
        ]
    return list(found)


def _apart(expected: Any, answer: Any) -> bool:
    """Return whether two constants differ by more than rounding: math-verify rounds to six decimals, also 1e-9 to 0."""
    from sympy import Expr

    if not all(isinstance(one, Expr) and one.is_number for one in (expected, answer)):
        return False
    values = [one.evalf(_DIGITS) for one in (expected, answer)]
    largest = max(map(abs, values))
    return bool(largest.is_finite and abs(values[0] - values[1]) > _MAX_ROUNDING * largest)


def _both(found: re.Match[str]) -> str:
    """Return the two values of one that holds a single sign of plus or minus."""
    return ",".join(f"{found[1]}{sign}{found[2]}" for sign in "+-")


def _listed(text: str) -> str:
    """Return a list with commas alone between what it lists."""
    return re.sub(r",\s*,", ",", _JOINED.sub(",", text))
