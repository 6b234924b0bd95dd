"""Records how long the code of groups gives no sign, and names groups that hang. Pure.

A rollout may wait in a thread that cannot be interrupted, while the process still sends heartbeats: only the time shows
that it hangs. Times at which a request to the inference server is under way do not count: the server may be unavailable
or slow.
"""

from dataclasses import dataclass

from lachesis.pipeline.common.usual_times import UsualTimes

__all__ = ["GroupTimes", "HangingGroup"]

_MIN_LATE_S = 7.0
"""Seconds of its own code from which a group may be late."""
_END_FACTOR = 30
"""A group is ended after this many times as long as the slowest of the last groups took."""


@dataclass(frozen=True, slots=True)
class HangingGroup:
    """A group that is ended, the item it is of, and for how many seconds its code has given no sign."""

    group: object
    item: str
    age_s: float


@dataclass(slots=True)
class _UnderWay:
    item: str
    since_s: float
    requests: int = 0
    longest_s: float = 0.0

    def age_s(self, now_s: float) -> float:
        return 0.0 if self.requests else now_s - self.since_s


class GroupTimes:
    """The groups of one environment that are under way, and how long the last ones left the model alone."""

    def __init__(self, limit_s: float, turn_s: float) -> None:
        """`limit_s`: after which a rollout is cancelled (`Environment.rollout_timeout_s`). `turn_s`: what a turn may
        take (`turn_timeout_s`); twice as much is never too long.
        """
        self._limit_s = limit_s
        self._least_end_s = 2 * turn_s
        self._under_way: dict[object, _UnderWay] = {}
        self._usual = UsualTimes(_MIN_LATE_S)

    def begin(self, group: object, item: str, now_s: float) -> None:
        """Note that a group was begun at `now_s`."""
        self._under_way[group] = _UnderWay(item, now_s)

    def record_request(self, group: object, change: int, now_s: float) -> None:
        """Note that a request to the inference server begins (1) or ends (-1).

        One of a group that has ended is left out.
        """
        one = self._under_way.get(group)
        if one is not None:
            one.longest_s = max(one.longest_s, one.age_s(now_s))
            one.requests, one.since_s = one.requests + change, now_s

    def end(self, group: object, now_s: float, *, made: bool) -> None:
        """Note that it is no longer under way, and whether it was made."""
        one = self._under_way.pop(group)
        if made:
            self._usual.add(max(one.longest_s, one.age_s(now_s)), now_s)

    @property
    def end_s(self) -> float:
        """Seconds of its own code after which a group is ended."""
        if not self._usual.is_known:
            return self._limit_s
        return min(self._limit_s, max(self._least_end_s, _END_FACTOR * self._usual.slowest_of_all_s))

    def hanging(self, now_s: float) -> list[HangingGroup]:
        """Return the groups that are to be ended."""
        ages = ((group, one.item, one.age_s(now_s)) for group, one in self._under_way.items())
        return [HangingGroup(*one) for one in ages if one[2] > self.end_s]

    def are_all_late(self, now_s: float) -> bool:
        """Return whether there are groups, and all of them are late: then nothing goes on."""
        ages = [one.age_s(now_s) for one in self._under_way.values()]
        return bool(ages) and min(ages) > self._usual.late_s

    def describe_late(self, now_s: float) -> str | None:
        """Return what to say of groups that are late; None: none is."""
        bound_s, usual_s = self._usual.late_s, self._usual.slowest_s
        late = [(one.item, age_s) for one in self._under_way.values() if (age_s := one.age_s(now_s)) > bound_s]
        if not late:
            return None
        item, age_s = max(late, key=lambda one: one[1])
        usual = (
            "and none was made yet" if usual_s is None else f"where the slowest of the last ones took {usual_s:.1f} s"
        )
        return (
            f"the code of {len(late)} of {len(self._under_way)} groups under way hangs, the longest (item {item}) for "
            f"{age_s:.0f} s, {usual}; they are ended after {self.end_s:.0f} s"
        )
