"""What the ledger's writer remembers of everything it has settled, in the few bytes that travel in each entry.

`Resolved` answers exactly, for every sequence of ROLLOUTS, whether its outcome is recorded. `ProducerMarks` recognises
a rollout published twice by its (producer, epoch, counter), however long ago the first one was.
"""

from lachesis.schemas.ledger import ProducerMark
from lachesis.schemas.plan import Plan

__all__ = ["ProducerMarks", "Resolved"]

_MOST_PRODUCERS = 256
"""Process lives remembered; beyond it the one silent for longest is forgotten, so that entries stay small."""
_MOST_ABOVE = 1024
"""Counters listed above a gap; beyond it the gap counts as never to be filled (a rollout that was never stored)."""


class Resolved:
    """A set of sequences: all up to `watermark`, and some above it."""

    def __init__(self, watermark: int = 0, packed: bytes = b"") -> None:
        self.watermark = watermark
        self._above = int.from_bytes(packed, "little")  # bit i: sequence watermark + 1 + i

    def __contains__(self, seq: int) -> bool:
        return seq <= self.watermark or bool(self._above >> (seq - self.watermark - 1) & 1)

    def add(self, seq: int) -> None:
        if seq > self.watermark:
            self._above |= 1 << (seq - self.watermark - 1)

    def advance(self, watermark: int) -> None:
        """Count everything up to `watermark` in."""
        if watermark > self.watermark:
            self._above >>= watermark - self.watermark
            self.watermark = watermark

    def pack(self) -> bytes:
        """Return the bits above the watermark, the first in the lowest bit, without trailing zero bytes."""
        return self._above.to_bytes((self._above.bit_length() + 7) // 8, "little")


class _Mark:
    def __init__(self, following: int = 0, above: set[int] | None = None) -> None:
        self.following = following
        self.above = above or set()

    def add(self, counter: int) -> None:
        if counter >= self.following:
            self.above.add(counter)
        if len(self.above) > _MOST_ABOVE:
            self.following = min(self.above)
        while self.following in self.above:
            self.above.remove(self.following)
            self.following += 1


class ProducerMarks:
    """Counters seen, by producer and epoch. Several epochs of a producer count side by side: the old process may still
    drain when the new one begins."""

    def __init__(self, packed: dict[str, ProducerMark] | None = None) -> None:
        # in order of last use: the oldest first, in the packed form as well
        self._marks = {key: _Mark(mark.next, set(mark.above)) for key, mark in (packed or {}).items()}

    def __contains__(self, plan: Plan) -> bool:
        mark = self._marks.get(_key(plan))
        return mark is not None and (plan.counter < mark.following or plan.counter in mark.above)

    def add(self, plan: Plan) -> None:
        mark = self._marks.pop(_key(plan), None) or _Mark()
        mark.add(plan.counter)
        self._marks[_key(plan)] = mark
        if len(self._marks) > _MOST_PRODUCERS:
            del self._marks[next(iter(self._marks))]

    def pack(self) -> dict[str, ProducerMark]:
        """Return the marks as they stand in a ledger entry, keyed `<producer>@<epoch>`."""
        return {
            key: ProducerMark(int(key.rpartition("@")[2]), mark.following, sorted(mark.above))
            for key, mark in self._marks.items()
        }


def _key(plan: Plan) -> str:
    return f"{plan.producer}@{plan.epoch}"
