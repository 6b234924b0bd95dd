"""Notes how long groups have been under way, and names those that take far too long. Pure.

A rollout may wait in a thread that nobody can interrupt, while the process sends heartbeats as ever: only time tells.
"""

from collections import deque

__all__ = ["GroupTimes"]

_MIN_LATE_S = 60.0
"""Seconds under way from which a group may be late."""
_LATE_FACTOR = 10
"""So many times as long as the slowest of the last groups took, a group is late."""
_REMEMBERED = 64


class GroupTimes:
    """The groups of one environment that are under way, and how long the last ones took."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: after which a rollout is cancelled (`Environment.rollout_timeout_s`)."""
        self._limit_s = limit_s
        self._began: dict[object, tuple[str, float]] = {}
        self._took_s: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self, group: object, item: str, now_s: float) -> None:
        """Note that a group was begun at `now_s`."""
        self._began[group] = item, now_s

    def end(self, group: object, now_s: float, *, made: bool) -> None:
        """Note that it is no longer under way, and whether it was made."""
        _, began_s = self._began.pop(group)
        if made:
            self._took_s.append(now_s - began_s)

    def describe_late(self, now_s: float) -> str | None:
        """Return what to say of groups that are late; None: none is."""
        usual_s = max(self._took_s, default=0.0)
        late = [(item, now_s - began_s) for item, began_s in self._began.values()]
        late = [(item, age_s) for item, age_s in late if age_s > max(_MIN_LATE_S, _LATE_FACTOR * usual_s)]
        if not late:
            return None
        item, age_s = max(late, key=lambda one: one[1])
        usual = f"where the slowest of the last ones took {usual_s:.1f} s" if self._took_s else "and none was made yet"
        return (
            f"{len(late)} of {len(self._began)} groups under way hang, the longest (item {item}) for {age_s:.0f} s, "
            f"{usual}; a rollout is ended after {self._limit_s:g} s (rollout_timeout_s)"
        )
