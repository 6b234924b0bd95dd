"""Numbers the windows of an environment's groups by their count. Pure.

It takes the sequences of ROLLOUTS at which groups of one environment are stored, in rising order, and returns the
window of each. It counts only this environment's groups, so groups of other environments change nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["GroupWindows"]


class GroupWindows:
    """Window k holds the groups number k * `width` to (k + 1) * `width` - 1 from sequence `first` on."""

    def __init__(self, width: int, first: int) -> None:
        self._width = width
        self._count = 0
        self._oldest = 0  # the window that the first of `_starts` is of
        self._starts: list[int] = []  # the first sequence of each window, in order
        self.base = 0
        """The oldest window that is not folded."""
        self.watermark = first
        """The lowest sequence that is not folded."""

    def of(self, seq: int) -> int:
        """Return the window that the sequence, one that was read, lies in."""
        return self._oldest + bisect_right(self._starts, seq) - 1

    def next(self) -> int:
        """Return the window of a group that is new, after all others."""
        return self._count // self._width

    def add(self, seq: int) -> None:
        """Count a group stored at `seq`, after all others."""
        if self._count % self._width == 0:
            self._starts.append(seq)
        self._count += 1

    def is_full(self, window: int) -> bool:
        """Whether nothing more can come into `window`."""
        return self._count >= (window + 1) * self._width

    def close(self, window: int, last: int) -> None:
        """Say that all up to `window`, which ends at sequence `last`, is folded."""
        self.base, self.watermark = window + 1, last + 1

    def finish(self, first: int) -> None:
        """Say that all before sequence `first` is folded, and nothing more comes."""
        self.watermark = max(self.watermark, first)

    def forget(self, before: int) -> None:
        """Drop the records of windows before `before`."""
        passed = max(0, before - self._oldest)
        del self._starts[:passed]
        self._oldest += passed

    def starts(self) -> list[int]:
        """Return the first sequences of the folded windows that are known, which `restore` needs."""
        return self._starts[: self.base - self._oldest]

    def restore(self, base: int, watermark: int, starts: Sequence[int]) -> None:
        """Take over the state in which all before window `base` was folded."""
        self.base, self.watermark = base, watermark
        self._starts, self._oldest = list(starts), base - len(starts)
        self._count = base * self._width  # the last one of a revision may have been shorter: it gets no more
