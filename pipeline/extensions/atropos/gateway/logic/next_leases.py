"""Holds the leases under which clients generate their next groups. Pure.

A client is answered when its environment has a lease for the next group; the lease waits here until that group arrives.
Guarantees that each group ends one lease of its client, even if that is too small for it; and that a lease whose
group does not arrive is given back: after a few times the longest that the environment has recently taken, or sooner if
nothing at all is heard of it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["NextLeases"]

_UNKNOWN_S = 60.0
"""Seconds for which a lease waits while it is not known how long the environment takes."""
_MIN_S = 5.0
_MAX_S = 1800.0
"""Seconds for which a lease waits at most: a lease that ran out may have been that of a client which is gone."""
_SILENT_S = 20.0
"""Seconds for which a lease waits for an environment of which nothing is heard; as long as a lease lives unrenewed."""
_USUAL_TIMES = 3.0
_FADES = 0.99
"""Factor by which the longest time counts less with each group after it."""
_MAX_OVERDUE = 1024
"""Leases given back that are remembered, to learn from a group that comes after all."""


@dataclass(frozen=True, slots=True)
class _NextLease:
    """A lease for a group that the client `owner` (None: one that has not registered) generates since `granted_s`."""

    owner: int | None
    lease: str
    sequences: int
    bytes: int
    granted_s: float


class NextLeases:
    """Those of one environment, oldest first; times are seconds of a clock that does not jump."""

    def __init__(self) -> None:
        self._leases: deque[_NextLease] = deque()
        self._overdue: deque[_NextLease] = deque(maxlen=_MAX_OVERDUE)
        self._longest_s: float | None = None

    @property
    def sequences(self) -> int:
        """Sequences of all leases that wait for their groups."""
        return sum(one.sequences for one in self._leases)

    def put(self, owner: int | None, lease: str, sequences: int, size: int, now_s: float) -> None:
        """Keep a lease for the next group of a client, which is answered now."""
        self._leases.append(_NextLease(owner, lease, sequences, size, now_s))

    def use(self, owner: int | None, sequences: int, size: int, now_s: float) -> str | None:
        """Return the lease that is kept for a group that has arrived; None: there is none large enough.

        It is one of the client's own. Those of others are not used: their groups come soon, or their client is gone and
        they must become overdue.
        """
        own = (one for one in self._leases if one.owner == owner)
        fitting = next((one for one in own if one.sequences >= sequences and one.bytes >= size), None)
        if fitting is not None:
            self._end(fitting, now_s)
            return fitting.lease
        late = next((one for one in self._overdue if one.owner == owner), None)
        if late is not None:
            self._overdue.remove(late)
            self._learn(now_s - late.granted_s)
        return None

    def give_back_too_small(self, owner: int | None, now_s: float) -> list[str]:
        """Return the lease of a client that was too small for its group, which is no longer kept."""
        found = next((one for one in self._leases if one.owner == owner), None)
        if found is None:
            return []
        self._end(found, now_s)
        return [found.lease]

    def _end(self, lease: _NextLease, now_s: float) -> None:
        self._leases.remove(lease)
        self._learn(now_s - lease.granted_s)

    def _learn(self, took_s: float) -> None:
        self._longest_s = max(took_s, _FADES * (self._longest_s or 0.0))

    def give_back(self, owner: int) -> list[str]:
        """Return the leases of a client that has left, which are no longer kept."""
        return self._drop(lambda one: one.owner == owner)

    def give_back_all(self) -> list[str]:
        """Return all leases, which are no longer kept."""
        return self._drop(lambda _: True)

    def give_back_overdue(self, now_s: float, *, silent: bool) -> list[str]:
        """Return the leases whose groups do not come, which are no longer kept.

        `silent`: nothing is heard of the environment.
        """
        allowed_s = _UNKNOWN_S
        if self._longest_s is not None:
            allowed_s = min(_MAX_S, max(_MIN_S, _USUAL_TIMES * self._longest_s))
        if silent:
            allowed_s = min(allowed_s, _SILENT_S)
        self._overdue.extend(one for one in self._leases if now_s - one.granted_s > allowed_s)
        return self._drop(lambda one: now_s - one.granted_s > allowed_s)

    def _drop(self, matches: Callable[[_NextLease], bool]) -> list[str]:
        dropped = [one.lease for one in self._leases if matches(one)]
        self._leases = deque(one for one in self._leases if not matches(one))
        return dropped
