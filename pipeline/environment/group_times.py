"""Records how long the code of groups gives no sign, and names groups that hang. Pure.

A rollout may wait in a thread that cannot be interrupted, while the process still sends heartbeats: only the time shows
that it hangs. Times at which a request to the inference server is under way do not count (`record_wait`): the server
may be unavailable or slow.
"""

from lachesis.pipeline.common.call_times import CallTimes, LateCalls, OldCall

__all__ = ["GroupTimes"]

_END_FACTOR = 30
"""A group is ended after this many times as long as the slowest of the last groups took."""


class GroupTimes(CallTimes):
    """The groups of one environment that are under way, and how long the last ones left the model alone."""

    def __init__(self, limit_s: float, turn_s: float) -> None:
        """`limit_s`: after which a rollout is cancelled (`Environment.rollout_timeout_s`). `turn_s`: what a turn may
        take (`turn_timeout_s`); twice as much is never too long.
        """
        super().__init__()
        self._limit_s = limit_s
        self._least_end_s = 2 * turn_s

    @property
    def end_s(self) -> float:
        """Seconds of its own code after which a group is ended."""
        usual = self.usual()
        if not usual.is_known:
            return self._limit_s
        return min(self._limit_s, max(self._least_end_s, _END_FACTOR * usual.slowest_of_all_s))

    def hanging(self, now_s: float) -> list[OldCall]:
        """Return the groups that are to be ended."""
        return self.older_than(self.end_s, now_s)

    def describe(self, late: LateCalls) -> str:
        """Return what to say of groups that are late."""
        return f"its code holds up groups: {late.describe('groups')}; they are ended after {self.end_s:.0f} s"
