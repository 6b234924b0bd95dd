"""A rater that takes its time, and one that may be away."""

import anyio

from lachesis import Sample, rater
from lachesis.pipeline.errors import InfrastructureError

is_away = False


@rater(bounds=(0.0, 1.0))
async def slow(sample: Sample, *, seconds: float) -> float:
    """Rate every other answer 1, after `seconds`."""
    await anyio.sleep(seconds)
    return float(int(sample.completion.split()[-1]) % 2)


@rater(bounds=(0.0, 1.0), inline=True)
def remote(sample: Sample) -> float:
    """Rate as `slow`, at once, unless it is away."""
    if is_away:
        raise InfrastructureError("connection refused")
    return float(int(sample.completion.split()[-1]) % 2)
