"""A rater: the more digits, the riper."""

from lachesis import Sample, rater


@rater(bounds=(0.0, 1.0), version="1")
def ripeness(sample: Sample) -> float:
    return sum(letter.isdigit() for letter in sample.text) / max(len(sample.text), 1)
