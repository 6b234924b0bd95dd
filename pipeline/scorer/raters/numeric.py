"""Rates 1 if the number given equals the reference number within a tolerance, else 0."""

# ruff: noqa: RUF001 - these characters are what is read

import math
import re
from collections.abc import Iterable
from fractions import Fraction

from lachesis.pipeline.scorer.answers.compare_math import is_equation_of_numbers, reference_answer
from lachesis.pipeline.scorer.answers.contradicted_numbers import is_contradicted_in_letters
from lachesis.pipeline.scorer.answers.given_and_reference import any_of, check_pattern, given
from lachesis.pipeline.scorer.answers.marked_answer import MarkedAnswer, marked_answer
from lachesis.pipeline.scorer.answers.number_of_sentence import last_number_in
from lachesis.pipeline.scorer.answers.number_of_short_answer import read_number
from lachesis.pipeline.scorer.answers.numbers_in_digits import Number
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.pipeline.tasks.thoughts import answer_part

__all__ = ["numeric"]

_CLAUSE_END = re.compile(
    r"[,;]\s|\s\(|\s[-–—]\s"
    r"|\s(?:because|since|as|so|which|from|given|when|if|but|and not|not|rather than|instead of|out of|of the)\s"
)

_CONTINUED = re.compile(
    r"^\s*[-–—,;]\s*(?:(?:and|or|to|maybe|perhaps|possibly)\s+)*(?:[A-Za-z]\s*=\s*)?[$€£(]*[-+−]?\d"
    r"|^[\s,;]*(?:and/or|or|maybe|perhaps|possibly)\b|^\s*\(\s*(?:or\s+(?:maybe\s+)?)?[$€£]?\d[\d.,]*\s*(?:\)|(?:if|when|with|without|depending)\b)",
    re.IGNORECASE,
)
"""What makes a number one of several."""
_LEFT_OPEN = re.compile(
    r"\b(?:could|might|may)\s+(?:also\s+|well\s+)?be\b[^.]*\d|\d[^.]*\b(?:otherwise|else)\b|\b(?:otherwise|else)\b[^.]*\d"
    r"|^\s*\(\s*(?:maybe|perhaps|possibly|\d[\d.,]*\s+(?:at (?:most|least)|max))\b",
    re.IGNORECASE,
)
_OR_ELSE = re.compile(r"^[.!?\s*_]*(?:or|alternatively|maybe|perhaps|possibly)\b[^.\n]{0,30}\d", re.IGNORECASE)
_COMPARED = re.compile(r"\b(?:more|fewer|less) than\b")
_CORRECTED = re.compile(
    r"(?:^|[.!?\n])\W*(?:wait|actually|no|hmm|correction|sorry|oops|scratch that|on second thought|I mean"
    r"|let me re\w+)\b",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"^\(?[A-J]\)?\s*[-–—:.]\s+")
"""The letter of a choice before what it says."""
_MAX_REST = 300


@rater(bounds=(0.0, 1.0), version="5", apart=("pattern",), check=check_pattern)
def numeric(
    sample: Sample, *, pattern: str | None = None, rel_tol: float = 1e-6, abs_tol: float = 1e-9
) -> float | None:
    r"""Compare the answer that the completion marks, or its last number, with the reference.

    Marks are \boxed{}, <answer>, "#### ", "the answer is" and bold, in this order; after the thinking alone. Numbers
    are read as people write them: `1,234.5`, `1.234,5`, `1 000`, `1e3`, `3/4`, `\frac{3}{4}`, `5 \times 10^{3}`, `18%`,
    `eighteen`. Several numbers or an operation are no answer.

    Abstains if the reference is not a number, and where an answer means the reference by one convention and something
    else by another: `1.234` for 1234.
    """

    def read() -> Number | None:
        if pattern is None:
            return _given_number(sample.text)
        found = given(sample, pattern)
        return None if found is None else _of_mark(MarkedAnswer(found, False))

    return any_of(sample, lambda text: _compared(_reference_number(text), read(), rel_tol, abs_tol))


def _compared(expected: Number | None, answer: Number | None, rel_tol: float, abs_tol: float) -> float | None:
    if expected is None:
        return None
    if answer is None:
        return 0.0

    def same(values: Iterable[Fraction]) -> bool:
        return any(
            math.isclose(_float(value), _float(wanted), rel_tol=rel_tol, abs_tol=abs_tol)
            for value in values
            for wanted in _meant(expected, answer)
        )

    if answer.computed and not expected.computed:
        return 0.0
    if answer.unit and expected.unit and answer.unit != expected.unit:
        return 0.0
    if same([answer.value]):
        return None if answer.bound else 1.0
    return None if same(answer.others) else 0.0


def _reference_number(text: str) -> Number | None:
    answer = reference_answer(text)
    number = read_number(answer)
    if number is None:
        number = last_number_in(answer)
    return number if number is not None and not number.bound and math.isfinite(_float(number.value)) else None


def _given_number(completion: str) -> Number | None:
    marked = marked_answer(completion)
    return last_number_in(answer_part(completion)) if marked is None else _of_mark(marked)


def _of_mark(marked: MarkedAnswer) -> Number | None:
    """Return the number of a marked answer. A mark that also stands elsewhere counts with what is around it."""
    if marked.sure:
        return last_number_in(marked.text) if is_equation_of_numbers(marked.text) else read_number(marked.text)
    if not any(map(str.isdigit, marked.text)):
        number = read_number(marked.text)
        return last_number_in(marked.rest) if number is None else number
    if _OR_ELSE.match(marked.rest):
        return None
    number = _offered(marked)
    after = last_number_in(marked.rest)
    if after is None:
        return number
    if number is None or _CORRECTED.search(marked.rest[:_MAX_REST]):
        return None if number is None else after
    return number._replace(others=(*number.others, after.value))


def _offered(marked: MarkedAnswer) -> Number | None:
    """Return the number of a sentence that says what the answer is, or of bold text, if it offers one alone."""
    text = _CHOICE.sub("", marked.text)
    shown, remainder = text, ""
    if read_number(shown) is None and (end := _CLAUSE_END.search(shown)) is not None:
        remainder = shown[end.start() :]
        if _LEFT_OPEN.search(remainder):
            return None
        clause = shown[: end.start()]
        number = read_number(clause)
        if number is not None and is_contradicted_in_letters(number, "", remainder):
            return None
        continued = _CONTINUED.search(remainder) is not None and not _says_again(number, remainder)
        if number is not None and not continued and not _COMPARED.search(clause):
            shown = clause
    behind = (text[len(shown) :] + marked.rest[:_MAX_REST]).split("(", 1)[0]
    return last_number_in(marked.before[-_MAX_REST:] + shown, behind)


def _says_again(number: Number | None, remainder: str) -> bool:
    """Return whether what follows in brackets is the same number: 1/2 (or 0.5)."""
    again = re.fullmatch(r"\s*\(\s*(?:or\s+)?([^()]*)\)\s*", remainder)
    other = None if again is None else read_number(again[1])
    return number is not None and other is not None and number.value in _meant(other, number)


def _meant(expected: Number, answer: Number) -> list[Fraction]:
    """Return the values that the answer may have: 18 % is 18 and 0.18, as the reference has it."""
    if answer.percent == expected.percent:
        return [expected.value]
    return [expected.value, expected.value / 100 if expected.percent else expected.value * 100]


def _float(value: Fraction) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
