"""Waiting out an outage: what infrastructure failed is tried again, with backoff, and nothing else is.

A full stream stays full until somebody makes room, so it is no outage.
"""

from collections.abc import Callable

import tenacity

from lachesis.pipeline.runtime.retries import retry_outages
from lachesis.schemas.errors import StreamFullError

__all__ = ["retrying"]

_OUTAGE_S = 60.0


def retrying(
    stop: Callable[[tenacity.RetryCallState], bool] = tenacity.stop_after_delay(_OUTAGE_S),  # noqa: B008 - it has no state
) -> tenacity.AsyncRetrying:
    """Return a retrier that repeats a call until `stop`, then raises its last error.

    The default is one minute.
    """
    return retry_outages(stop, never=StreamFullError)
