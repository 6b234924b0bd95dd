"""Holds annotations that arrived before their rollout: the two streams are read side by side.

Guarantees bounded memory: an annotation that has no room is refused, and the reader must read more rollouts first.
"""

import heapq
from typing import NamedTuple

from lachesis.schemas.annotations import DeadLetter, GroupReward, TeacherPointer

__all__ = ["Annotation", "PendingAnnotation", "PendingAnnotations"]

Annotation = GroupReward | TeacherPointer | DeadLetter

_MAX_PENDING = 4096


class PendingAnnotation(NamedTuple):
    """An annotation as stored at `event_seq` of EVENTS, which names the rollout at `rollout_seq` of ROLLOUTS.

    It counts for rollouts from sequence `first` on.
    """

    event_seq: int
    stored_ns: int
    rollout_seq: int
    item: Annotation
    first: int = 1


class PendingAnnotations:
    """Annotations by target: a group id, or for dead letters the sequence (in digits) of the message that died."""

    def __init__(self) -> None:
        self._by_target: dict[str, list[PendingAnnotation]] = {}
        self._order: list[tuple[int, int, str]] = []  # a heap; the event's sequence breaks ties

    def __len__(self) -> int:
        return len(self._by_target)

    def hold(self, target: str, annotation: PendingAnnotation) -> bool:
        """Keep an annotation. False: there is no room."""
        if len(self._order) >= _MAX_PENDING:
            return False
        self._by_target.setdefault(target, []).append(annotation)
        heapq.heappush(self._order, (annotation.rollout_seq, annotation.event_seq, target))
        return True

    def pop(self, *targets: str) -> list[PendingAnnotation]:
        """Remove and return the annotations kept for the targets, in the order of EVENTS."""
        found = [annotation for target in targets for annotation in self._by_target.pop(target, ())]
        return sorted(found, key=lambda annotation: annotation.event_seq)

    def drop_up_to(self, frontier: int) -> None:
        """Forget annotations of rollouts up to `frontier`: another run's, settled ones, or none at all."""
        while self._order and self._order[0][0] <= frontier:
            target = heapq.heappop(self._order)[2]
            left = [annotation for annotation in self._by_target.pop(target, ()) if annotation.rollout_seq > frontier]
            if left:
                self._by_target[target] = left

    def clear(self) -> None:
        self._by_target.clear()
        self._order.clear()

    def lowest_event(self) -> int | None:
        """Return the lowest sequence of EVENTS kept."""
        return min((annotation.event_seq for kept in self._by_target.values() for annotation in kept), default=None)
