"""Base-2 exponential histogram: percentiles within 1.1 % at any scale, merged by adding counts.

The buckets are those of OpenTelemetry's exponential histogram at scale 5: bucket i holds values in
(2^(i/32), 2^((i+1)/32)], so a value reported as the bucket's middle is off by at most 2^(1/64) - 1 = 1.09 %.
Values are seconds. Negative ones (clocks that disagree) count as zero and are counted apart.
"""

import math
import sys
from collections.abc import Iterable
from typing import Self

from lachesis.schemas.control import PackedHistogram

__all__ = ["Histogram"]

SCALE = 5
_PER_OCTAVE = 1 << SCALE


class Histogram:
    """Counts of positive values by bucket; `merge` of two equals the histogram of both inputs together."""

    __slots__ = ("buckets", "count", "high", "low", "negatives", "total", "zeros")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.low = math.inf
        self.high = 0.0
        self.zeros = 0
        self.negatives = 0

    def record(self, value: float) -> None:
        """Count one value, seconds."""
        if value <= 0.0:
            self.negatives += value < 0.0
            self.zeros += 1
            value = 0.0
        else:
            index = math.ceil(math.log2(value) * _PER_OCTAVE) - 1
            self.buckets[index] = self.buckets.get(index, 0) + 1
        self.count += 1
        self.total = min(self.total + value, sys.float_info.max)
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile (0 <= q <= 1) in seconds, None when nothing was counted."""
        if not self.count:
            return None
        rank = max(1, math.ceil(q * self.count))
        if rank <= self.zeros:
            return 0.0
        seen = self.zeros
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen >= rank:
                middle: float = 2.0 ** ((index + 0.5) / _PER_OCTAVE)
                return min(max(middle, self.low), self.high)
        return self.high

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def merge(self, other: "Histogram") -> None:
        """Add the other's counts to this one."""
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.count += other.count
        self.total = min(self.total + other.total, sys.float_info.max)
        self.low = min(self.low, other.low)
        self.high = max(self.high, other.high)
        self.zeros += other.zeros
        self.negatives += other.negatives

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return what was counted after `earlier`, a histogram of the same values up to some moment.

        Its lowest and highest value are only as exact as their buckets.
        """
        found = Histogram()
        grown = {index: count - earlier.buckets.get(index, 0) for index, count in self.buckets.items()}
        found.buckets = {index: count for index, count in grown.items() if count > 0}
        found.zeros = self.zeros - earlier.zeros
        found.count = found.zeros + sum(found.buckets.values())
        found.total = self.total - earlier.total
        found.negatives = self.negatives - earlier.negatives
        found.low, found.high = self.low, self.high
        return found

    def pack(self) -> PackedHistogram:
        """Return the histogram as it travels in a heartbeat."""
        indexes = sorted(self.buckets)
        return PackedHistogram(
            count=self.count,
            total=self.total,
            low=self.low if self.count else 0.0,
            high=self.high,
            zeros=self.zeros,
            negatives=self.negatives,
            indexes=indexes,
            counts=[self.buckets[index] for index in indexes],
        )

    @classmethod
    def unpack(cls, packed: PackedHistogram) -> Self:
        """Return the histogram that `pack` described."""
        histogram = cls()
        histogram.buckets = dict(zip(packed.indexes, packed.counts, strict=True))
        histogram.count = packed.count
        histogram.total = packed.total
        histogram.low = packed.low if packed.count else math.inf
        histogram.high = packed.high
        histogram.zeros = packed.zeros
        histogram.negatives = packed.negatives
        return histogram

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the histogram of some values, seconds."""
        histogram = cls()
        for value in values:
            histogram.record(value)
        return histogram
