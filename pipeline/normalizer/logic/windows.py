"""Numbers the windows of an environment's groups, by their count or by their sequences. Pure.

What goes in: the sequences of ROLLOUTS at which groups of one environment are stored, rising. What comes out: which
window each is in. `GroupWindows` counts the groups, so what other environments store changes nothing. `StreamWindows`
cuts the stream itself, as builds did before: only so are statistics that were recorded then continued and replayed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal

__all__ = ["GroupWindows", "StreamWindows", "WindowKind", "make_windows"]

WindowKind = Literal["groups", "stream"]


class StreamWindows:
    """Sequence s is in window (s - 1) // `width`, its sender."""

    kind: WindowKind = "stream"

    def __init__(self, width: int, first: int) -> None:
        self._width = width
        self.base = self.of(first)
        """The oldest window that is not folded."""

    def of(self, seq: int) -> int:
        """Return the window that the sequence, one that was read, lies in."""
        return (seq - 1) // self._width

    def following(self, seq: int) -> int:
        """Return the window of a group that is new at `seq`, after all others."""
        return self.of(seq)

    def add(self, seq: int) -> None:
        """Count a group stored at `seq`, after all others."""

    def is_full(self, window: int, last: int) -> bool:
        """Whether nothing more can come into `window`, where sequence `last` was read."""
        return self.of(last) > window

    def skip_empty(self, oldest: int | None, last: int) -> None:
        """Go on to the oldest window that has groups (None: there is none), where sequence `last` was read."""
        self.base = max(self.base, self.of(last) if oldest is None else oldest)

    def fold(self, window: int, last: int) -> None:
        """Say that all up to `window`, which ends at sequence `last`, is folded."""
        self.base = window + 1

    @property
    def watermark(self) -> int:
        """The lowest sequence that is not folded."""
        return self.base * self._width + 1

    def end(self, first: int) -> int:
        """Say that nothing more comes from sequence `first` on; return what counts as read then."""
        return (self.of(first - 1) + 1) * self._width + 1

    def finish(self, first: int) -> None:
        """Say that all before sequence `first` is folded, and nothing more comes."""

    def has_folded_beyond(self, seq: int, first: int) -> bool:
        """Whether `seq` was folded before it was known that what begins with `first` is another's."""
        return self.base > self.of(first - 1) + 1 and self.of(seq) < self.base

    def forget(self, before: int) -> None:
        """Drop what is known of windows before `before`."""

    def starts(self) -> list[int]:
        """Return what `restore` needs of folded windows."""
        return []

    def restore(self, base: int, watermark: int, starts: Sequence[int]) -> None:
        """Take over the state in which all before window `base` was folded."""
        self.base = base


class GroupWindows:
    """Window k holds the groups number k * `width` to (k + 1) * `width` - 1 from sequence `first` on."""

    kind: WindowKind = "groups"

    def __init__(self, width: int, first: int) -> None:
        self._width = width
        self._count = 0
        self._oldest = 0  # the window that the first of `_starts` is of
        self._starts: list[int] = []  # the first sequence of each window, in order
        self.base = 0
        self.watermark = first

    def of(self, seq: int) -> int:
        return self._oldest + bisect_right(self._starts, seq) - 1

    def following(self, seq: int) -> int:
        return self._count // self._width

    def add(self, seq: int) -> None:
        if self._count % self._width == 0:
            self._starts.append(seq)
        self._count += 1

    def is_full(self, window: int, last: int) -> bool:
        return self._count >= (window + 1) * self._width

    def skip_empty(self, oldest: int | None, last: int) -> None:
        pass

    def fold(self, window: int, last: int) -> None:
        self.base, self.watermark = window + 1, last + 1

    def end(self, first: int) -> int:
        return first - 1

    def finish(self, first: int) -> None:
        self.watermark = max(self.watermark, first)

    def has_folded_beyond(self, seq: int, first: int) -> bool:
        return seq < self.watermark

    def forget(self, before: int) -> None:
        passed = max(0, before - self._oldest)
        del self._starts[:passed]
        self._oldest += passed

    def starts(self) -> list[int]:
        return self._starts[: self.base - self._oldest]

    def restore(self, base: int, watermark: int, starts: Sequence[int]) -> None:
        self.base, self.watermark = base, watermark
        self._starts, self._oldest = list(starts), base - len(starts)
        self._count = base * self._width  # the last one of a revision may have been shorter: it gets no more


def make_windows(kind: WindowKind, width: int, first: int) -> "StreamWindows | GroupWindows":
    """Return the windows of what is stored from sequence `first` on."""
    return StreamWindows(width, first) if kind == "stream" else GroupWindows(width, first)
