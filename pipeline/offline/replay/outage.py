"""Waits out an outage: retries infrastructure failures with backoff, and no other errors.

A full stream stays full until somebody makes room, so it is no outage.
"""

from dataclasses import replace

import anyio

from lachesis.pipeline.errors import StreamFullError
from lachesis.pipeline.runtime.retries import OUTAGE_POLICY, OutageRetries, WaitLog, is_infrastructure, retry_outages

__all__ = ["retrying"]

_FOR_A_MINUTE = replace(OUTAGE_POLICY, give_up_s=60.0)
_wait_log = WaitLog()


def retrying(what: str, draining: anyio.Event | None = None) -> OutageRetries:
    """Return a retrier that repeats a call until `draining` is set, then raises its last error.

    Without `draining` it does so for one minute. Waits are logged.
    """
    policy = _FOR_A_MINUTE if draining is None else OUTAGE_POLICY
    return retry_outages(what, _wait_log, policy=policy, is_outage=_may_pass, draining=draining)


def _may_pass(error: BaseException) -> bool:
    return is_infrastructure(error) and not isinstance(error, StreamFullError)
