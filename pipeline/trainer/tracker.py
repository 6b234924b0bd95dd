"""The interface of a tracker, and the outbox that keeps a slow one from holding up the trainer.

Guarantees: each tracker gets its messages in order; an unavailable one delays neither training nor the other trackers;
the messages that wait for it are bounded in bytes, and if they do not fit, the oldest are dropped, counted and
reported.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.health.logic.alert_changes import AlertNotification
from lachesis.pipeline.runtime.retries import RetryWait, WaitLog, retry_outages
from lachesis.pipeline.trainer.samples import ReadableSample
from lachesis.schemas.errors import DataError

__all__ = ["MAX_WAITING_BYTES", "RETRIES", "STEP", "Outbox", "Tracker"]

log = logging.getLogger("lachesis")

MAX_WAITING_BYTES = 32 << 20
"""What may wait for one tracker."""
STEP = "train/step"
"""The figure that is the step axis."""
_MAX_TEXT = 500
RETRIES = RetryPolicy(first_s=0.5, longest_s=5.0, jitter=0.5)
"""A tracker that is back within the seconds that it has at the end of a run gets what waits for it."""


class Tracker(Protocol):
    """One experiment tracker. Its methods may block, and run in threads, one at a time.

    Whatever they raise, training goes on. They raise `InfrastructureError` if the tracker's server or disk is
    unavailable, and are then called again. They raise `DataError` if the tracker refuses a message, which is then
    logged and left out. `step` counts optimizer steps.
    """

    name: str

    def check(self) -> str:
        """Return where the figures would go, once that was tried, for `lachesis doctor`."""

    def open(self, step: int) -> int | None:
        """Open or resume the run: figures of the steps after `step` that an earlier life sent come again.

        Return the last step of which it has the figures, if what it lacks up to `step` is to be sent; else None.
        """

    def log_figures(self, figures: dict[str, float], step: int) -> None:
        """Send figures of a step; a second call for the same step adds to it."""

    def log_samples(self, rows: Sequence[ReadableSample], step: int) -> None:
        """Send a table of samples."""

    def log_alert(self, alert: AlertNotification, step: int) -> None:
        """Send what changed among the alerts of an environment."""

    def close(self) -> None:
        """Send the rest and end."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    call: Callable[[], None]
    nbytes: int
    sent: anyio.Event


class Outbox:
    """Messages that wait for one tracker, oldest first. `set_note(name, text)` reports a delay; None: there is none."""

    def __init__(
        self, tracker: Tracker, set_note: Callable[[str, str | None], None], max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self.tracker = tracker
        self.dropped = 0
        self._set_note = set_note
        self._max_bytes = max_bytes
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._more = anyio.Event()
        self._closed = False
        self._log_wait = WaitLog()

    def put(self, call: Callable[[], None], nbytes: int) -> anyio.Event:
        """Queue `call`. Returns an event that is set once it was made or dropped."""
        entry = _Waiting(call, nbytes, anyio.Event())
        self._waiting.append(entry)
        self._bytes += nbytes
        while self._bytes > self._max_bytes and len(self._waiting) > 1:
            self._pop_oldest().sent.set()
            self.dropped += 1
        self._more.set()
        return entry.sent

    @property
    def waiting(self) -> int:
        """How many messages are not sent yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Let `send` end once nothing waits."""
        self._closed = True
        self._more.set()

    async def send(self, step: int, figures_after: Callable[[int], Sequence[dict[str, float]]]) -> None:
        """Open the tracker at optimizer step `step` and send what waits, until it is closed and nothing does.

        Before that, the figures up to `step` that the tracker lacks are sent, because an earlier life ended while it
        was away: `figures_after(known)` returns those after the last step that it has. A tracker that cannot be opened
        gets nothing: its messages are dropped until the trainer starts again.
        """
        known: int | None = None

        def open_tracker() -> None:
            nonlocal known
            known = self.tracker.open(step)

        refused = await self._call(open_tracker)
        lacking = [] if known is None else figures_after(known)
        if lacking:
            log.info("sending %d steps that %s lacks, from metrics.jsonl", len(lacking), self.tracker.name)
        for figures in lacking:
            await self._call(partial(self.tracker.log_figures, figures, int(figures[STEP])))
        if refused is not None:
            note = f"{self.tracker.name} cannot be opened, so it gets nothing: {refused}"
            self._set_note(self.tracker.name, f"{note}; training goes on, and metrics.jsonl holds every figure")
        while True:
            while self._waiting:
                entry = self._pop_oldest()
                if refused is None:
                    await self._call(entry.call)
                entry.sent.set()
            if self._closed:
                break
            self._more = anyio.Event()
            await self._more.wait()
        if refused is None:
            await self._call(self.tracker.close)

    def _pop_oldest(self) -> _Waiting:
        entry = self._waiting.popleft()
        self._bytes -= entry.nbytes
        return entry

    async def _call(self, call: Callable[[], None]) -> str | None:
        """Make a call until the tracker is there. Return what it says where it refuses it."""
        retrying = retry_outages(f"send figures to {self.tracker.name}", self._report_wait, policy=RETRIES)
        refused: str | None = None
        try:
            await retrying(partial(anyio.to_thread.run_sync, call, abandon_on_cancel=True))
        except DataError as error:
            refused = str(error)
        except Exception as error:  # noqa: BLE001 - another project's code; no tracker ends a trainer
            refused = without_secrets(f"{type(error).__name__}: {error}")[:_MAX_TEXT]
        if refused is not None:
            log.warning("%s refuses what it was sent, which is left out: %s", self.tracker.name, refused)
        self._set_note(self.tracker.name, None)
        return refused

    def _report_wait(self, wait: RetryWait) -> None:
        lost = f"; {self.dropped} entries did not fit and were dropped" if self.dropped else ""
        self._set_note(self.tracker.name, f"{wait}{lost}; training goes on, and metrics.jsonl holds every figure")
        self._log_wait(wait)
