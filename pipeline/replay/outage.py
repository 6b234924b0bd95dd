"""Waiting out an outage: what infrastructure failed is tried again, with backoff, and nothing else is.

A full stream stays full until somebody makes room, so it is no outage.
"""

from collections.abc import Callable

import tenacity

from lachesis.schemas.errors import InfrastructureError, StreamFullError

__all__ = ["retrying"]

_OUTAGE_S = 60.0


def retrying(
    stop: Callable[[tenacity.RetryCallState], bool] = tenacity.stop_after_delay(_OUTAGE_S),  # noqa: B008 - it has no state
) -> tenacity.AsyncRetrying:
    """Return what tries a call again until `stop`, by default for a minute, and then raises its last error."""
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(InfrastructureError)
        & tenacity.retry_if_not_exception_type(StreamFullError),
        wait=tenacity.wait_random_exponential(multiplier=0.1, max=5.0),
        stop=stop,
        reraise=True,
    )
