"""Annotations that came before the rollout they belong to: the two streams are read side by side.

Guarantees bounded memory: one too many is refused, and the reader has to let the rollouts catch up first.
"""

import heapq
from typing import NamedTuple

from lachesis.schemas.annotations import DeadLetter, GroupReward, TeacherPointer

__all__ = ["Annotation", "Early", "EarlyAnnotations"]

Annotation = GroupReward | TeacherPointer | DeadLetter

_MOST = 4096


class Early(NamedTuple):
    """An annotation as stored at `event_seq` of EVENTS, which names the rollout at `rollout_seq` of ROLLOUTS.

    It counts for rollouts from sequence `first` on.
    """

    event_seq: int
    stored_ns: int
    rollout_seq: int
    item: Annotation
    first: int = 1


class EarlyAnnotations:
    """Annotations by target: a group id, or for dead letters the sequence (in digits) of the message that died."""

    def __init__(self) -> None:
        self._by_target: dict[str, list[Early]] = {}
        self._order: list[tuple[int, int, str]] = []  # a heap; the event's sequence breaks ties

    def __len__(self) -> int:
        return len(self._by_target)

    def add(self, target: str, early: Early) -> bool:
        """Keep an annotation. False: there is no room."""
        if len(self._order) >= _MOST:
            return False
        self._by_target.setdefault(target, []).append(early)
        heapq.heappush(self._order, (early.rollout_seq, early.event_seq, target))
        return True

    def take(self, *targets: str) -> list[Early]:
        """Remove and return what is kept for the targets, in the order of EVENTS."""
        found = [early for target in targets for early in self._by_target.pop(target, ())]
        return sorted(found, key=lambda early: early.event_seq)

    def drop_up_to(self, frontier: int) -> None:
        """Forget what names a rollout up to `frontier`: it is another run's, or settled, or never was."""
        while self._order and self._order[0][0] <= frontier:
            target = heapq.heappop(self._order)[2]
            left = [early for early in self._by_target.pop(target, ()) if early.rollout_seq > frontier]
            if left:
                self._by_target[target] = left

    def clear(self) -> None:
        self._by_target.clear()
        self._order.clear()

    def lowest_event(self) -> int | None:
        """Return the lowest sequence of EVENTS kept."""
        return min((early.event_seq for kept in self._by_target.values() for early in kept), default=None)
