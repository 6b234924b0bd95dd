"""The retry loop: repeats calls that fail for infrastructure, and reports each wait before it begins.

All other errors are raised at once. The loop is tenacity's; the pauses are those of a `RetryPolicy`.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import anyio
import tenacity

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.errors import InfrastructureError

__all__ = ["OUTAGE_POLICY", "RetryWait", "WaitLog", "is_infrastructure", "retry_outages"]

log = logging.getLogger("lachesis")

OUTAGE_POLICY = RetryPolicy(first_s=0.1, longest_s=5.0, jitter=1.0)
"""For outages of what a service depends on: short at first, and all replicas at different times."""

_LOG_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class RetryWait:
    """The pause before the next attempt: what is tried, since when, and why the last attempt failed."""

    what: str
    error: BaseException
    failures: int
    """Attempts so far."""
    since: datetime
    """UTC, when the first attempt began."""

    def __str__(self) -> str:
        return f"{self.what}: {self.error or type(self.error).__name__} (tried since {self.since:%H:%M:%S} UTC)"


class WaitLog:
    """Logs waits where no heartbeat can show them: the first of each kind at once, then one every 30 s.

    `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_s: dict[str, float] = {}  # by what is tried

    def __call__(self, wait: RetryWait) -> None:
        """Log `wait`, unless one for the same thing was logged in the last 30 s."""
        now_s = self._clock()
        self._logged_s = {what: at_s for what, at_s in self._logged_s.items() if now_s - at_s < _LOG_EVERY_S}
        if wait.what not in self._logged_s:
            self._logged_s[wait.what] = now_s
            log.warning("trying again: %s", wait)


def is_infrastructure(error: BaseException) -> bool:
    """Return whether `error` says that something is away for now, and nothing about the work itself."""
    return isinstance(error, InfrastructureError)


def retry_outages(
    what: str,
    report: Callable[[RetryWait], None],
    *,
    policy: RetryPolicy = OUTAGE_POLICY,
    is_outage: Callable[[BaseException], bool] = is_infrastructure,
    draining: anyio.Event | None = None,
) -> tenacity.AsyncRetrying:
    """Return an iterator that tries `what` again after errors for which `is_outage` holds.

    It raises the last error once the policy gives up, or once `draining` is set; that also ends a pause. `report` is
    called before each pause.
    """

    def stop(state: tenacity.RetryCallState) -> bool:
        drained = draining is not None and draining.is_set()
        return drained or policy.gives_up(state.attempt_number, state.seconds_since_start or 0.0)

    async def sleep(seconds: float) -> None:
        if draining is None:
            await anyio.sleep(seconds)
            return
        with anyio.move_on_after(seconds):
            await draining.wait()

    def before_sleep(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if error is not None:
            since = datetime.now(UTC) - timedelta(seconds=state.seconds_since_start or 0.0)
            report(RetryWait(what, error, state.attempt_number, since))

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(is_outage),
        wait=lambda state: policy.pause_s(state.attempt_number),
        stop=stop,
        sleep=sleep,
        before_sleep=before_sleep,
        reraise=True,
    )
