"""Notes how long calls are under way, and finds those that take far longer than the last did. Pure.

A call is whatever is waited for: a rater, a request to an inference server, the code of a group. A time in which this
process was held up itself does not count: it heard no answer meanwhile.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["LOOK_S", "CallTimes", "LateCalls", "OldCall", "UsualTimes"]

LOOK_S = 1.0
"""Seconds between two looks at the calls (`CallTimes.check_clock`)."""
_MIN_LATE_S = 7.0
"""Seconds from which a call may be late."""
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
    """How long the last calls of one kind took, in seconds.

    A call that was late says little of what is usual: what held it up may come again, and is to be named again. So it
    counts only once calls were late at several times.
    """

    def __init__(self) -> None:
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
        return max(_MIN_LATE_S if self.is_known else _UNKNOWN_S, _LATE_FACTOR * usual_s)

    def _late_episodes(self) -> int:
        """Return at how many times apart from each other calls were late."""
        episodes, end_s = 0, float("-inf")
        for one in self._late:
            episodes += one.began_s > end_s
            end_s = max(end_s, one.ended_s)
        return episodes


@dataclass(frozen=True, slots=True)
class LateCalls:
    """`count` of the calls that are `under_way` take far longer than usual; `usual_s` is the slowest of the last ones.

    `what` is the longest about, and of which `kind` is it; it is under way for `age_s`.
    """

    count: int
    under_way: int
    what: str
    kind: str
    age_s: float
    usual_s: float | None

    @property
    def are_all(self) -> bool:
        """Whether all calls that are under way are late: then nothing goes on."""
        return self.count == self.under_way

    def describe(self, calls: str) -> str:
        """Return a text about them. `calls`: what they are called."""
        about = self.kind or self.what
        longest = f"the longest{f' ({about})' if about else ''} for {self.age_s:.0f} s"
        usual = (
            "none was answered yet" if self.usual_s is None else f"the slowest of the last took {self.usual_s:.1f} s"
        )
        hang = "hangs" if self.count == 1 else "hang"
        return f"{self.count} of {self.under_way} {calls} under way {hang}, {longest}; {usual}"


@dataclass(frozen=True, slots=True)
class OldCall:
    """A call that is under way for a certain time."""

    call: object
    what: str
    age_s: float


@dataclass(slots=True)
class _UnderWay:
    what: str
    kind: str
    since_s: float
    waits: int = 0
    longest_s: float = 0.0

    def age_s(self, now_s: float) -> float:
        return 0.0 if self.waits else now_s - self.since_s


class CallTimes:
    """Calls that are under way, and how long the last ones of each kind took."""

    def __init__(self) -> None:
        self._under_way: dict[object, _UnderWay] = {}
        self._usual: dict[str, UsualTimes] = {}
        self._looked_s: float | None = None

    def begin(self, call: object, now_s: float, *, what: str = "", kind: str = "") -> None:
        """Note that a call was begun; one that is begun again starts again.

        `what` it is about; calls of one `kind` should take about as long as each other.
        """
        self._under_way[call] = _UnderWay(what, kind, now_s)

    def record_wait(self, call: object, change: int, now_s: float) -> None:
        """Note that a call begins (1) or ends (-1) to wait for something whose time does not count.

        Then the longest time between two waits counts. A call that has ended is left out.
        """
        one = self._under_way.get(call)
        if one is not None:
            one.longest_s = max(one.longest_s, one.age_s(now_s))
            one.waits, one.since_s = one.waits + change, now_s

    def end(self, call: object, now_s: float, *, answered: bool) -> None:
        """Note that a call is over; unless it was `answered`, it says nothing of what is usual.

        One that was never begun is left out.
        """
        one = self._under_way.pop(call, None)
        if one is not None and answered:
            took_s = max(one.longest_s, one.age_s(now_s))
            self._usual.setdefault(one.kind, UsualTimes()).add(took_s, now_s)

    def check_clock(self, now_s: float) -> None:
        """Note that this process runs; to be called every `LOOK_S`.

        If it was held up since the last call, that time does not count.
        """
        held_up_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if held_up_s > 2 * LOOK_S:
            for one in self._under_way.values():
                one.since_s = min(now_s, one.since_s + held_up_s)

    def late(self, now_s: float) -> LateCalls | None:
        """Return what is known of the calls that take far longer than usual; None: none does."""
        late = [one for one in self._under_way.values() if one.age_s(now_s) > self.usual(one.kind).late_s]
        if not late:
            return None
        longest = max(late, key=lambda one: one.age_s(now_s))
        usual_s = self.usual(longest.kind).slowest_s
        age_s = longest.age_s(now_s)
        return LateCalls(len(late), len(self._under_way), longest.what, longest.kind, age_s, usual_s)

    def older_than(self, age_s: float, now_s: float) -> list[OldCall]:
        """Return the calls that are under way for longer."""
        ages = ((call, one.what, one.age_s(now_s)) for call, one in self._under_way.items())
        return [OldCall(*one) for one in ages if one[2] > age_s]

    def usual(self, kind: str = "") -> UsualTimes:
        """Return how long the last calls of a kind took."""
        return self._usual.get(kind) or UsualTimes()
