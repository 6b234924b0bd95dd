"""A rater: short answers are better, down to `enough` tokens."""

from lachesis import Sample, rater


@rater(bounds=(0.0, 1.0), version="1")
def brevity(sample: Sample, *, enough: int = 20) -> float:
    return min(1.0, enough / max(sample.token_count, 1))
