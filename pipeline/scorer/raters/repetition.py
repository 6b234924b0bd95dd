"""Rates how little a completion repeats itself: the share of its n-grams that are distinct."""

from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.pipeline.scorer.raters.text_units import text_units
from lachesis.schemas.errors import ConfigError

__all__ = ["repetition"]


def _check(*, n: int = 3) -> None:
    if n < 1:
        raise ConfigError(f"rater repetition: n is {n}; it must be at least 1.")


@rater(bounds=(0.0, 1.0), version="3", check=_check)
def repetition(sample: Sample, *, n: int = 3) -> float:
    """Return distinct / all n-grams of words: 1 for fewer than n words, 0 for none.

    A character is a word of its own where a text has no words to count (see `text_units`).
    """
    _check(n=n)
    words = text_units(sample.completion)
    if not words:
        return 0.0
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
