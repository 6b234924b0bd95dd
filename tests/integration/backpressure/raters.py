"""A rater that takes its time."""

import anyio

from lachesis import Sample, rater


@rater(bounds=(0.0, 1.0))
async def slow(sample: Sample, *, seconds: float) -> float:
    """Rate every other answer 1, after `seconds`."""
    await anyio.sleep(seconds)
    return float(int(sample.completion.split()[-1]) % 2)
