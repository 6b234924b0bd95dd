"""Detects calls that take too long, by how long the last calls of their kind took. Pure."""

from collections import deque
from typing import NamedTuple

__all__ = ["UsualTimes"]

_UNKNOWN_S = 60.0
"""Seconds from which a call is late while little is known of what is usual."""
_LATE_FACTOR = 10
"""So many times as long as the slowest of the last calls took, a call is late."""
_KNOWN_AFTER = 8
"""Calls from which on it is known what is usual."""
_REMEMBERED = 64
_LATE_REMEMBERED = 1024
"""Calls for which a late one among them is remembered."""
_USUAL_EPISODES = 3
"""Times apart from each other at which calls were late, from which on it is usual that they take so long."""


class _LateCall(NamedTuple):
    number: int
    began_s: float
    ended_s: float

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s


class UsualTimes:
    """How long the last calls took, in seconds. `min_late_s`: no call is late before.

    A call that was late says little of what is usual: what held it up may come again, and is to be named again. So it
    counts only once calls were late at several times.
    """

    def __init__(self, min_late_s: float) -> None:
        self._min_late_s = min_late_s
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._late: deque[_LateCall] = deque(maxlen=_REMEMBERED)
        self._count = 0

    def add(self, took_s: float, now_s: float) -> None:
        """Note that a call, which ends now, took so long."""
        self._count += 1
        if self.is_known and took_s > self.late_s:
            self._late.append(_LateCall(self._count, now_s - took_s, now_s))
        else:
            self._took_s.append(took_s)
        while self._late and self._count - self._late[0].number > _LATE_REMEMBERED:
            self._late.popleft()

    @property
    def slowest_s(self) -> float | None:
        """The longest of the last calls that were not late; None before any."""
        return max(self._took_s, default=None)

    @property
    def slowest_of_all_s(self) -> float:
        """The longest of the last calls, late ones included; 0 before any."""
        return max([*self._took_s, *(one.took_s for one in self._late)], default=0.0)

    @property
    def is_known(self) -> bool:
        """Whether there were enough calls to say what is usual."""
        return len(self._took_s) >= _KNOWN_AFTER

    @property
    def late_s(self) -> float:
        """Seconds after which a call is late."""
        usual_s = self.slowest_of_all_s if self._late_episodes() >= _USUAL_EPISODES else self.slowest_s or 0.0
        return max(self._min_late_s if self.is_known else _UNKNOWN_S, _LATE_FACTOR * usual_s)

    def _late_episodes(self) -> int:
        """Return at how many times apart from each other calls were late."""
        episodes, end_s = 0, float("-inf")
        for one in self._late:
            episodes += one.began_s > end_s
            end_s = max(end_s, one.ended_s)
        return episodes
