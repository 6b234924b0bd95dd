"""Rates the length of a completion in tokens: 1 within limits, falling linearly to 0 outside them."""

from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.schemas.errors import ConfigError

__all__ = ["length"]


def _check(*, shortest: int = 1, longest: int = 1024, ramp: int = 64) -> None:
    if ramp < 1 or longest < shortest:
        raise ConfigError(f"rater length: needs shortest ({shortest}) <= longest ({longest}) and ramp ({ramp}) >= 1.")


@rater(bounds=(0.0, 1.0), inline=True, check=_check)
def length(sample: Sample, *, shortest: int = 1, longest: int = 1024, ramp: int = 64) -> float:
    """Return 1 for `shortest` to `longest` generated tokens, 0 from `ramp` tokens beyond either."""
    _check(shortest=shortest, longest=longest, ramp=ramp)
    beyond = max(shortest - sample.token_count, sample.token_count - longest, 0)
    return max(0.0, 1.0 - beyond / ramp)
