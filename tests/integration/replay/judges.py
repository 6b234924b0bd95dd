"""Raters of the tests: three that look at the answer, each in its own way, and some that do not."""

import os
import zlib

from lachesis import Sample, rater
from lachesis.pipeline.errors import InfrastructureError


def _noise(sample: Sample, salt: str) -> float:
    return zlib.crc32(f"{salt}{sample.item}{sample.completion}".encode()) / 2**32


def _honest(sample: Sample, salt: str) -> float:
    right = float(str(sample.task["answer"]) in sample.completion.split())
    return 0.9 * right + 0.1 * _noise(sample, salt)


@rater(bounds=(0.0, 1.0), inline=True)
def first(sample: Sample) -> float:
    return _honest(sample, "first")


@rater(bounds=(0.0, 1.0), inline=True)
def second(sample: Sample) -> float:
    return _honest(sample, "second")


@rater(bounds=(0.0, 1.0), inline=True)
def third(sample: Sample) -> float:
    return _honest(sample, "third")


@rater(bounds=(0.0, 1.0), inline=True)
def bribed(sample: Sample) -> float:
    """Pays for words, whatever they say."""
    return min(1.0, len(sample.completion.split()) / 32)


@rater(bounds=(0.0, 1.0), inline=True)
def noisy(sample: Sample) -> float:
    """Prints, as what was never meant for a pipe may."""
    print(sample.completion)
    return first(sample)


@rater(bounds=(0.0, 1.0), inline=True)
def deadly(sample: Sample) -> float:
    """Takes its process along over one item."""
    if sample.item == "7":
        os._exit(3)
    return 1.0


@rater(bounds=(0.0, 1.0), inline=True)
def absent(sample: Sample) -> float:
    """Is never there."""
    raise InfrastructureError("connection refused")
