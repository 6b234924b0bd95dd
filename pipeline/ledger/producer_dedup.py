"""Drops repeated rollouts by producer watermarks: a few bytes in each ledger entry.

`ResolvedSet` answers exactly, for every sequence of ROLLOUTS, whether its outcome is recorded. `ProducerDedup`
recognises a rollout published twice by its (producer, epoch, counter), however long ago the first one was.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from lachesis.schemas.ledger import ProducerMark
from lachesis.schemas.planning_header import Plan

__all__ = ["ProducerDedup", "ResolvedSet"]

_MAX_PRODUCERS = 256
"""Process lives remembered. Beyond this, the one that was silent for longest is forgotten, so that entries stay
small."""
_MAX_RANGES_PER_PRODUCER = 1024
"""Ranges of counters kept of one life. Beyond this, the lowest gaps between ranges count as never to be filled (their
rollouts were never stored), but no gap above the lowest counter without an outcome."""
_MAX_RANGES = 16 * _MAX_RANGES_PER_PRODUCER
"""Beyond this, all gaps may count as never to be filled, so that an entry always fits into a message."""


class ResolvedSet:
    """A set of sequences: all up to `watermark`, and some above it."""

    def __init__(self, watermark: int = 0, packed: bytes = b"") -> None:
        self.watermark = watermark
        self._above = int.from_bytes(packed, "little")  # bit i: sequence watermark + 1 + i

    def __contains__(self, seq: int) -> bool:
        return seq <= self.watermark or bool(self._above >> (seq - self.watermark - 1) & 1)

    def mark(self, seq: int) -> None:
        if seq > self.watermark:
            self._above |= 1 << (seq - self.watermark - 1)

    def mark_up_to(self, watermark: int) -> None:
        """Add everything up to `watermark`."""
        if watermark > self.watermark:
            self._above >>= watermark - self.watermark
            self.watermark = watermark

    def pack(self) -> bytes:
        """Return the bits above the watermark, the first in the lowest bit, without trailing zero bytes."""
        return self._above.to_bytes((self._above.bit_length() + 7) // 8, "little")


class _ProducerCounters:
    """A set of counters as ranges: `bounds` holds start and end of each, [start, end), ascending and apart."""

    def __init__(self, bounds: Sequence[int] = ()) -> None:
        self.bounds = list(bounds)

    def __contains__(self, counter: int) -> bool:
        return bisect_right(self.bounds, counter) % 2 == 1

    def count(self, counter: int) -> None:
        if counter in self:
            return
        for bound in (counter, counter + 1):  # a bound that exists already is a neighbour's: the two become one range
            i = bisect_left(self.bounds, bound)
            if i < len(self.bounds) and self.bounds[i] == bound:
                del self.bounds[i]
            else:
                self.bounds.insert(i, bound)

    def close_gaps(self, lowest_open: int | None) -> None:
        """Count the lowest gaps as seen until `_MAX_RANGES_PER_PRODUCER` / 2 ranges are left.

        Up to `_MAX_RANGES` ranges, no gap from `lowest_open` on is closed.
        """
        limit = self.bounds[-_MAX_RANGES_PER_PRODUCER]
        if lowest_open is not None and len(self.bounds) <= 2 * _MAX_RANGES:
            limit = min(limit, lowest_open)
        below = bisect_left(self.bounds, limit)
        below += below % 2  # odd where the limit is the end of a range; it never lies inside one
        if below:
            self.bounds[:below] = [0, self.bounds[below - 1]]


class ProducerDedup:
    """Counters seen, by producer and epoch. Several epochs of a producer count side by side: the old process may still
    drain when the new one begins.
    """

    def __init__(self, packed: Mapping[str, ProducerMark] | None = None) -> None:
        # in order of last use: the oldest first, in the packed form as well
        self._marks = {key: _ProducerCounters(mark.seen) for key, mark in (packed or {}).items()}

    def __contains__(self, plan: Plan) -> bool:
        mark = self._marks.get(_key(plan))
        return mark is not None and plan.counter in mark

    def record(self, plan: Plan) -> bool:
        """Record the counter of `plan`. True: there are many ranges now, and `close_gaps` should follow."""
        mark = self._marks.pop(_key(plan), None) or _ProducerCounters()
        mark.count(plan.counter)
        self._marks[_key(plan)] = mark
        if len(self._marks) > _MAX_PRODUCERS:
            del self._marks[next(iter(self._marks))]
        return len(mark.bounds) > 2 * _MAX_RANGES_PER_PRODUCER

    def close_gaps(self, plan: Plan, lowest_open: int | None) -> None:
        """Forget the oldest counter gaps of the plan's producer, but none from counter `lowest_open` on."""
        self._marks[_key(plan)].close_gaps(lowest_open)

    def pack(self) -> dict[str, ProducerMark]:
        """Return the marks in the form of a ledger entry, keyed `<producer>@<epoch>`."""
        return {key: ProducerMark(int(key.rpartition("@")[2]), list(mark.bounds)) for key, mark in self._marks.items()}


def _key(plan: Plan) -> str:
    return f"{plan.producer}@{plan.epoch}"
