"""Distributions as sparse counts, for mid-rank normalization: exact to a cell, mergeable, bounded.

From finite rewards it computes the share of the rewards seen that lies below a value. Values are held as the integers
of `accumulator.quantize`, in cells of 2^shift of them, where shift is the smallest with which no more than `MAX_CELLS`
cells are occupied. Cells of a larger shift are unions of those of a smaller one, so counts depend neither on the order
of adding nor on the way of merging, and one far outlier costs a cell, not resolution.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from lachesis.pipeline.common.number_arguments import listed
from lachesis.pipeline.normalizer.logic.accumulator import FRACTION_BITS, quantize
from lachesis.schemas.errors import DataError

__all__ = ["MAX_CELLS", "MAX_SHIFT", "RankCounts", "RankTable"]

MAX_CELLS = 128
"""Occupied cells of one window and key; stored they take 34 bytes each at most."""
MAX_SHIFT = 73
"""A shift at which values of magnitude 1e12 lie in two cells."""


class RankCounts:
    """Counts of one window and key: `cells` has how many values lie in [cell, cell + 1) * 2^shift."""

    __slots__ = ("cells", "groups", "shift")

    def __init__(self, shift: int = 0, groups: int = 0, cells: dict[int, int] | None = None) -> None:
        self.shift = shift
        self.groups = groups
        self.cells = {} if cells is None else cells

    def add_group(self, column: Iterable[float | None]) -> None:
        """Add one group's finite values; None is skipped, and a column of None alone counts no group."""
        values = [quantize(value) >> self.shift for value in listed("value", column) if value is not None]
        for cell in values:
            self.cells[cell] = self.cells.get(cell, 0) + 1
        self.groups += bool(values)
        self._bound()

    def merge(self, other: "RankCounts") -> None:
        """Add what another holds."""
        shift = max(self.shift, other.shift)
        mine = _coarser(self.cells, shift - self.shift)
        for cell, count in _coarser(other.cells, shift - other.shift).items():
            mine[cell] = mine.get(cell, 0) + count
        self.shift, self.cells, self.groups = shift, mine, self.groups + other.groups
        self._bound()

    def _bound(self) -> None:
        while len(self.cells) > MAX_CELLS:
            self.shift += 1
            self.cells = _coarser(self.cells, 1)

    def to_list(self) -> tuple[int, int, str]:
        """Return shift, groups and the cells in ascending order as text: hexadecimal, each as cell:count."""
        return self.shift, self.groups, " ".join(f"{cell:x}:{count:x}" for cell, count in sorted(self.cells.items()))

    @classmethod
    def from_list(cls, fields: tuple[int, int, str]) -> "RankCounts":
        """Undo `to_list`."""
        shift, groups, text = fields
        pairs = (pair.split(":") for pair in text.split())
        return cls(shift, groups, {int(cell, 16): int(count, 16) for cell, count in pairs})


class RankTable(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution that a snapshot holds of one key, immutable.

    `edges` are the lower ends of the occupied cells in units of the reward, ascending, each cell 2^(shift - 32) wide;
    `below` the weights below each of them, and of all at the end. `count` and `groups` are plain numbers.
    """

    count: int
    groups: int
    shift: int
    edges: list[float]
    below: list[int]

    @classmethod
    def of(cls, parts: Sequence[tuple[int, RankCounts]]) -> "RankTable":
        """Return the table of counts with integer weights."""
        shift = max((part.shift for _, part in parts), default=0)
        weights: dict[int, int] = {}
        for factor, part in parts:
            for cell, count in _coarser(part.cells, shift - part.shift).items():
                weights[cell] = weights.get(cell, 0) + factor * count
        cells = sorted(weights)
        return cls(
            count=sum(sum(part.cells.values()) for _, part in parts),
            groups=sum(part.groups for _, part in parts),
            shift=shift,
            edges=[_edge(cell, shift) for cell in cells],
            below=list(accumulate((weights[cell] for cell in cells), initial=0)),
        )

    def rank(self, value: float) -> float:
        """Return the share of weight below `value`, half of its equals included, in [0, 1].

        Values in one cell are taken to lie evenly in it. Raises `DataError` if the table is empty, or `value` is no
        number.
        """
        total = self.below[-1]
        if not total:
            raise DataError("a table without values ranks nothing.")
        quantized = quantize(value)
        cell = quantized >> self.shift
        at = bisect_left(self.edges, _edge(cell, self.shift))
        if at == len(self.edges) or self.edges[at] != _edge(cell, self.shift):
            return self.below[at] / total
        offset = 2 * (quantized - (cell << self.shift)) + 1  # the middle of a unit, in half units
        inside = self.below[at + 1] - self.below[at]
        # A quotient of integers is correctly rounded: equal on every machine, and monotone
        return ((self.below[at] << self.shift + 1) + inside * offset) / (total << self.shift + 1)


def _coarser(cells: dict[int, int], by: int) -> dict[int, int]:
    merged: dict[int, int] = {}
    for cell, count in cells.items():
        merged[cell >> by] = merged.get(cell >> by, 0) + count
    return merged


def _edge(cell: int, shift: int) -> float:
    return math.ldexp(cell, shift - FRACTION_BITS)  # exact: a reward has no more bits than a float, nor has its floor
