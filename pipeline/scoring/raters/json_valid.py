"""Rates 1 if the answer is JSON with the wanted keys, else 0."""

import json
from collections.abc import Sequence

from lachesis.pipeline.scoring.rater import Sample, rater
from lachesis.pipeline.scoring.raters.answer import given

__all__ = ["json_valid"]


@rater(bounds=(0.0, 1.0))
def json_valid(sample: Sample, *, pattern: str | None = None, required: Sequence[str] = ()) -> float:
    """Parse the answer strictly (no NaN or Infinity); with `required`, it must be an object that has these keys."""
    try:
        value = json.loads(given(sample, pattern) or "", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    if required and not (isinstance(value, dict) and all(key in value for key in required)):
        return 0.0
    return 1.0


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
