"""The retry loop: repeats calls that fail for infrastructure, and reports each wait before it begins.

All other errors are raised at once. The loop is tenacity's; the pauses are those of a `RetryPolicy`.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import anyio
import tenacity

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.errors import InfrastructureError

__all__ = ["OUTAGE_POLICY", "OutageRetries", "RetryWait", "WaitLog", "is_infrastructure", "retry_outages"]

log = logging.getLogger("lachesis")

T = TypeVar("T")

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


class OutageRetries:
    """What `retry_outages` returns: `await retries(function, *args)`, or `async for attempt in retries`.

    A call whose first attempt succeeds, as nearly all do, costs no more than the function.
    """

    def __init__(
        self,
        what: str,
        report: Callable[[RetryWait], None],
        policy: RetryPolicy,
        is_outage: Callable[[BaseException], bool],
        draining: anyio.Event | None,
    ) -> None:
        self._what, self._report, self._policy = what, report, policy
        self._is_outage, self._draining = is_outage, draining

    async def __call__(self, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
        """Call `function` until it answers. Raises what it raises, an outage once the policy gives up."""
        start_s = time.monotonic()
        try:
            return await function(*args, **options)
        except BaseException as error:
            if not self._is_outage(error):
                raise
            failed: list[BaseException] = [error]

        async def go_on() -> T:
            if failed:
                raise failed.pop()  # the attempt that was made already
            return await function(*args, **options)

        return await self._loop(time.monotonic() - start_s)(go_on)

    def __aiter__(self) -> tenacity.AsyncRetrying:
        return self._loop(0.0).__aiter__()

    def _loop(self, tried_s: float) -> tenacity.AsyncRetrying:
        """Return the loop of a call that has been tried for `tried_s` seconds."""

        def seconds(state: tenacity.RetryCallState) -> float:
            return tried_s + (state.seconds_since_start or 0.0)

        def stop(state: tenacity.RetryCallState) -> bool:
            drained = self._draining is not None and self._draining.is_set()
            return drained or self._policy.gives_up(state.attempt_number, seconds(state))

        async def sleep(pause_s: float) -> None:
            if self._draining is None:
                await anyio.sleep(pause_s)
                return
            with anyio.move_on_after(pause_s):
                await self._draining.wait()

        def before_sleep(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if error is not None:
                since = datetime.now(UTC) - timedelta(seconds=seconds(state))
                self._report(RetryWait(self._what, error, state.attempt_number, since))

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._is_outage),
            wait=lambda state: self._policy.pause_s(state.attempt_number),
            stop=stop,
            sleep=sleep,
            before_sleep=before_sleep,
            reraise=True,
        )


def retry_outages(
    what: str,
    report: Callable[[RetryWait], None],
    *,
    policy: RetryPolicy = OUTAGE_POLICY,
    is_outage: Callable[[BaseException], bool] = is_infrastructure,
    draining: anyio.Event | None = None,
) -> OutageRetries:
    """Return what tries `what` again after errors for which `is_outage` holds.

    It raises the last error once the policy gives up, or once `draining` is set; that also ends a pause. `report` is
    called before each pause.
    """
    return OutageRetries(what, report, policy, is_outage, draining)
