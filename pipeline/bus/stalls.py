"""Waits for the server: which one has lasted too long, since when, and why. Pure.

Guarantees that a stall is known as long as its wait lasts and no longer, so that what is said of it never outlives it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["NO_ANSWER", "STALLED_AFTER_S", "Stall", "Wait", "Waits"]

STALLED_AFTER_S = 2.5
"""A wait for the server that lasts longer is a stall. An answer takes milliseconds, a new leader up to two seconds."""

NO_ANSWER = "no answer"
"""The reason as long as nothing more is known."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait for the server that has lasted `seconds` so far: for `what`, and why, as far as is known."""

    what: str
    reason: str
    seconds: float

    def __str__(self) -> str:
        return f"stalled for {self.seconds:.0f} s: {self.what}: {self.reason}"


@dataclass(slots=True, eq=False)
class Wait:
    """One wait under way. Whoever waits keeps `reason` up to date."""

    what: str
    began_s: float
    reason: str = NO_ANSWER


class Waits:
    """All waits of one connection, oldest first. `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waits: dict[Wait, None] = {}

    @contextmanager
    def waiting(self, what: str) -> Iterator[Wait]:
        """Count the context as a wait for `what`."""
        wait = Wait(what, self._clock())
        self._waits[wait] = None
        try:
            yield wait
        finally:
            del self._waits[wait]

    def seconds(self, wait: Wait) -> float:
        """Return how long a wait has lasted so far."""
        return self._clock() - wait.began_s

    @property
    def stall(self) -> Stall | None:
        """The longest wait, if it is a stall."""
        oldest = next(iter(self._waits), None)
        if oldest is None or self.seconds(oldest) < STALLED_AFTER_S:
            return None
        return Stall(oldest.what, oldest.reason, self.seconds(oldest))
