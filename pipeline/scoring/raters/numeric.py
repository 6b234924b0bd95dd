"""Rates 1 if the number given equals the reference number within a tolerance, else 0."""

import math
import re

from lachesis.pipeline.scoring.rater import Sample, rater
from lachesis.pipeline.scoring.raters.answer import given, reference

__all__ = ["last_number", "numeric"]

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*)?\.?\d+(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d+)?")


@rater(bounds=(0.0, 1.0))
def numeric(
    sample: Sample, *, pattern: str | None = None, rel_tol: float = 1e-6, abs_tol: float = 1e-9
) -> float | None:
    """Compare the last number of the answer with the reference.

    `1,234.5`, `1e3` and `3/4` are read. Abstains if the reference is not a number.
    """
    expected = last_number(reference(sample) or "")
    if expected is None:
        return None
    answer = last_number(given(sample, pattern) or "")
    return float(answer is not None and math.isclose(answer, expected, rel_tol=rel_tol, abs_tol=abs_tol))


def last_number(text: str) -> float | None:
    """Return the last number in `text`; None if there is none or it is not finite."""
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None:
        return None
    numerator, _, denominator = last.group().replace(",", "").partition("/")
    value = float(numerator)
    if denominator:
        divisor = float(denominator)
        if divisor == 0:
            return None
        value /= divisor
    return value if math.isfinite(value) else None
