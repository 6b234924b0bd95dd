"""Tells from how long the last calls of one kind took what takes too long. Pure."""

from collections import deque

__all__ = ["UsualTimes"]

_UNKNOWN_S = 60.0
"""Seconds from which a call is late while little is known of what is usual."""
_LATE_FACTOR = 10
"""So many times as long as the slowest of the last calls took, a call is late."""
_KNOWN_AFTER = 8
"""Calls from which on it is known what is usual."""
_REMEMBERED = 64


class UsualTimes:
    """How long the last calls took, in seconds. `min_late_s`: no call is late before."""

    def __init__(self, min_late_s: float) -> None:
        self._min_late_s = min_late_s
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, took_s: float) -> None:
        """Note that a call took so long."""
        self._took_s.append(took_s)

    @property
    def slowest_s(self) -> float | None:
        """The longest of the last calls; None before any."""
        return max(self._took_s, default=None)

    @property
    def is_known(self) -> bool:
        """Whether there were enough calls to say what is usual."""
        return len(self._took_s) >= _KNOWN_AFTER

    @property
    def late_s(self) -> float:
        """Seconds after which a call is late."""
        return max(self._min_late_s if self.is_known else _UNKNOWN_S, _LATE_FACTOR * (self.slowest_s or 0.0))
