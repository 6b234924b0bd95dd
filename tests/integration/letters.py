"""A rater that tells any two texts apart, so that the groups of an untrained model are worth training on."""

from lachesis import Sample, rater


@rater(bounds=(0.0, 1.0), inline=True)
def letters(sample: Sample) -> float:
    """Return the share of letters among the characters."""
    text = sample.completion
    return sum(character.isalpha() for character in text) / max(len(text), 1)
