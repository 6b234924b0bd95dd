"""Rates how little a completion repeats itself: the share of its word n-grams that are distinct."""

from lachesis.pipeline.scoring.rater import Sample, rater

__all__ = ["repetition"]


@rater(bounds=(0.0, 1.0))
def repetition(sample: Sample, *, n: int = 3) -> float:
    """Return distinct / all n-grams of white-space separated words: 1 for fewer than n words, 0 for none."""
    words = sample.completion.split()
    if not words:
        return 0.0
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
