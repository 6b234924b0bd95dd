"""Lays the tokens of several rows one behind the other, without padding, and says where each lies.

Pure. Layers see one row of all tokens. Only attention works on separate rows: on a few grids of rows of like length, so
that no token sees another sequence and no mask has the size of all tokens squared.

Dimension suffixes: B rows, T tokens of the longest, N tokens of all rows, G places of all grids, b rows of one grid, t
its width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Grid", "PackedRows"]

_NARROWEST = 0.75
"""A row shorter than this part of a grid's width begins the next grid."""


class Grid(NamedTuple):
    """Some rows, padded on the right to the longest of them; its places begin at `start` among those of all grids."""

    rows: int
    width: int
    start: int
    is_full: bool
    """Whether no place is padding."""

    @property
    def places(self) -> slice:
        """Its places among those of all grids."""
        return slice(self.start, self.start + self.rows * self.width)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """The tokens of B rows in one, row after row."""

    width: int
    """T: that of the padded rows."""
    lengths: tuple[int, ...]
    """[B]"""
    tokens: int
    """N."""
    starts_B: torch.Tensor
    """int64; where each row begins among the N tokens."""
    padded_N: torch.Tensor
    """int64; place of each token in the padded rows, [B,T] in a row."""
    positions_1N: torch.Tensor
    """int64 [1,N]; place of each token in its own row."""
    grids: tuple[Grid, ...]
    spread_G: torch.Tensor
    """int64; the token at each place of the grids, and at padding the last one of its row."""
    token_G: torch.Tensor
    """int64; the same, and -1 at padding."""
    back_N: torch.Tensor
    """int64; the place in the grids of each token."""

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, move: Callable[[torch.Tensor], torch.Tensor]) -> PackedRows:
        """Return those of rows of these `lengths`, padded to `width`; `move` brings a tensor to the device."""
        starts_B = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        positions = [np.arange(length) for length in lengths]
        padded_N = np.concatenate([row * width + own for row, own in enumerate(positions)])
        grids: list[Grid] = []
        spread: list[NDArray[np.int64]] = []
        real: list[NDArray[np.bool_]] = []
        for rows in _alike(lengths):
            longest = lengths[rows[0]]
            start = sum(len(row) for row in spread)
            for row in rows:
                at_T = np.arange(longest)
                spread.append(starts_B[row] + np.minimum(at_T, lengths[row] - 1))
                real.append(at_T < lengths[row])
            grids.append(Grid(len(rows), longest, start, lengths[rows[-1]] == longest))
        spread_G, real_G = np.concatenate(spread), np.concatenate(real)
        back_N = np.empty(len(padded_N), np.int64)
        back_N[spread_G[real_G]] = np.flatnonzero(real_G)

        def moved(values: NDArray[Any]) -> torch.Tensor:
            return move(torch.from_numpy(values))

        return cls(
            width=width,
            lengths=tuple(lengths),
            tokens=len(padded_N),
            starts_B=moved(starts_B.astype(np.int64)),
            padded_N=moved(padded_N),
            positions_1N=moved(np.concatenate(positions)[None]),
            grids=tuple(grids),
            spread_G=moved(spread_G),
            token_G=moved(np.where(real_G, spread_G, -1)),
            back_N=moved(back_N),
        )

    def packed_places(self, at_n: torch.Tensor) -> torch.Tensor:
        """Return which of the N tokens are at the places `at_n` of [B,T-1], the last column left out."""
        row_n = at_n // (self.width - 1)
        return self.starts_B[row_n] + at_n - row_n * (self.width - 1)

    def packed(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Return values [B,T,...] of the padded rows as [1,N,...]."""
        return values_BT.flatten(0, 1).index_select(0, self.padded_N)[None]


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows in grids of like length, the longest first."""
    grids: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not grids or lengths[row] < _NARROWEST * lengths[grids[-1][0]]:
            grids.append([])
        grids[-1].append(row)
    return grids
