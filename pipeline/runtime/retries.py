"""The retry policy: repeats calls that fail for infrastructure, with random exponential backoff.

All other errors are raised at once.
"""

from collections.abc import Awaitable, Callable

import anyio
import tenacity

from lachesis.schemas.errors import InfrastructureError

__all__ = ["retry_outages"]

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0


def retry_outages(
    stop: Callable[[tenacity.RetryCallState], bool] = tenacity.stop_never,
    *,
    never: type[InfrastructureError] | tuple[type[InfrastructureError], ...] = (),
    longest_s: float = _MAX_PAUSE_S,
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    before_sleep: Callable[[tenacity.RetryCallState], None] | None = None,
) -> tenacity.AsyncRetrying:
    """Return an iterator that retries `InfrastructureError` with backoff until the service drains.

    The last error is raised then. Pauses grow from about 0.1 s to `longest_s` seconds.
    """
    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(InfrastructureError) & tenacity.retry_if_not_exception_type(never),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=longest_s),
        stop=stop,
        sleep=sleep,
        before_sleep=before_sleep,
        reraise=True,
    )
