"""Waits for the server: which one has lasted too long, since when, and why. Pure.

Guarantees that a stall is known as long as its wait lasts and no longer, so that what is said of it never outlives it.
A wait that gave up and is tried again within `RETRY_GAP_S` is the same wait: it began when the first attempt did.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lachesis.pipeline.errors import InfrastructureError

__all__ = ["BELIEVE_LOSS_S", "NO_ANSWER", "RETRY_GAP_S", "STALLED_AFTER_S", "ServerStall", "ServerWait", "ServerWaits"]

STALLED_AFTER_S = 2.5
"""A wait for the server that lasts longer is a stall. An answer takes milliseconds, a new leader up to two seconds."""

RETRY_GAP_S = 6.0
"""Longest pause between two attempts at the same thing; the retries of services pause for up to 5 s."""

BELIEVE_LOSS_S = 12.0
"""How long a leader must go on knowing of less than was stored before history counts as lost.

One that was cut off leads on without a majority for some seconds, and answers from what it has.
"""

NO_ANSWER = "no answer"
"""The reason as long as nothing more is known."""


@dataclass(frozen=True, slots=True)
class ServerStall:
    """A wait for the server that has lasted `seconds` so far: for `what`, and why, as far as is known.

    `stream` is the stream that does not answer; it is empty if no single one is meant.
    """

    what: str
    reason: str
    seconds: float
    stream: str = ""

    def __str__(self) -> str:
        return f"stalled for {self.seconds:.0f} s: {self.what}: {self.reason}"


@dataclass(slots=True, eq=False)
class ServerWait:
    """One wait under way. The waiting task keeps `reason` up to date. `ended_s`: when it gave up, None: it goes on."""

    what: str
    stream: str
    began_s: float
    reason: str = NO_ANSWER
    ended_s: float | None = None


class ServerWaits:
    """All waits of one connection. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: set[ServerWait] = set()
        self._given_up: dict[str, ServerWait] = {}  # by what was waited for: it may be tried again

    @contextmanager
    def waiting(self, what: str, stream: str = "") -> Iterator[ServerWait]:
        """Count the context as a wait for `what`.

        An `InfrastructureError` out of it says that the wait gave up.
        """
        wait = self.begin(what, stream)
        try:
            yield wait
        except InfrastructureError:
            wait.ended_s = self._clock()
            self._given_up[what] = wait
            raise
        else:
            self._given_up.pop(what, None)
        finally:
            self.end(wait)

    def begin(self, what: str, stream: str = "", reason: str = NO_ANSWER) -> ServerWait:
        """Begin a wait, which `end` ends."""
        wait = ServerWait(what, stream, self._clock(), reason)
        before = self._given_up.get(what)
        if before is not None and self._is_recent(before):
            wait.began_s, wait.reason = before.began_s, before.reason
        self._waits.add(wait)
        return wait

    def end(self, wait: ServerWait) -> None:
        self._waits.discard(wait)

    def seconds(self, wait: ServerWait) -> float:
        """Return how long a wait has lasted so far."""
        return self._clock() - wait.began_s

    @property
    def stall(self) -> ServerStall | None:
        """The longest wait, if it is a stall."""
        self._given_up = {what: wait for what, wait in self._given_up.items() if self._is_recent(wait)}
        under_way = [*self._waits, *self._given_up.values()]
        oldest = min(under_way, key=lambda wait: wait.began_s, default=None)
        if oldest is None or self.seconds(oldest) < STALLED_AFTER_S:
            return None
        return ServerStall(oldest.what, oldest.reason, self.seconds(oldest), oldest.stream)

    def _is_recent(self, wait: ServerWait) -> bool:
        return wait.ended_s is None or self._clock() - wait.ended_s <= RETRY_GAP_S
