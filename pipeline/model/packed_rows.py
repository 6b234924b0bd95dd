"""Lays the tokens of several rows one behind the other, without padding, and says where each lies.

Pure. Layers see one row of all tokens. Only attention works on separate rows: on a few grids of rows of like length, so
that no token sees another sequence and no mask has the size of all tokens squared. Rows that begin with the same tokens
may share them, as a tree: layers compute them once, and attention sees them in each row. Each row then gets what it
would alone, because nothing before a fork depends on what comes after it.

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

__all__ = ["Grid", "PackedRows", "SharedStart", "shared_starts"]

_NARROWEST = 0.75
"""A row shorter than this part of a grid's width begins the next grid."""


class SharedStart(NamedTuple):
    """The first `tokens` of a row are those of the earlier row `row`."""

    row: int = 0
    tokens: int = 0


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
    """The tokens of B rows in one, row after row, without those that a row shares with an earlier one."""

    width: int
    """T: that of the padded rows."""
    lengths: tuple[int, ...]
    """[B]"""
    tokens: int
    """N."""
    place_P: torch.Tensor
    """int64; which of the N tokens is at each place of [B,T] in a row, and at padding the last one of its row."""
    padded_N: torch.Tensor
    """int64; place of each token in the padded rows, [B,T] in a row."""
    positions_1N: torch.Tensor
    """int64 [1,N]; place of each token in its own row."""
    grids: tuple[Grid, ...]
    spread_G: torch.Tensor
    """int64; the token at each place of the grids, and at padding the last one of its row."""
    real_G: torch.Tensor
    """bool; where the grids have no padding."""
    token_G: torch.Tensor
    """int64; as spread_G, and -1 at padding and where a row has a token that it shares with an earlier one."""
    back_N: torch.Tensor
    """int64; the place in the grids of each token, in the row that has it first."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """int64 each: further places in the grids of tokens that rows share, and which tokens these are. No token comes
    twice in one of the pairs. Empty where no row shares any."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        width: int,
        move: Callable[[torch.Tensor], torch.Tensor],
        shared: Sequence[SharedStart] | None = None,
    ) -> PackedRows:
        """Return those of rows of these `lengths`, padded to `width`; `move` brings a tensor to the device.

        `shared`: what each row shares with an earlier one; None: nothing.
        """
        starts = [SharedStart()] * len(lengths) if shared is None else shared
        positions = [np.arange(start.tokens, length) for start, length in zip(starts, lengths, strict=True)]
        padded_N = np.concatenate([row * width + at_row for row, at_row in enumerate(positions)])
        places: list[NDArray[np.int64]] = []
        """Of each row, which of the N tokens it has."""
        begun = 0
        for common, at_row in zip(starts, positions, strict=True):
            before = places[common.row][: common.tokens] if common.tokens else np.empty(0, np.int64)
            places.append(np.concatenate([before, begun + np.arange(len(at_row))]))
            begun += len(at_row)
        at_T = np.arange(width)
        place_P = np.concatenate([of_row[np.minimum(at_T, len(of_row) - 1)] for of_row in places])
        grids: list[Grid] = []
        spread: list[NDArray[np.int64]] = []
        real: list[NDArray[np.bool_]] = []
        own: list[NDArray[np.bool_]] = []
        for rows in _alike(lengths):
            longest = lengths[rows[0]]
            start = sum(len(row) for row in spread)
            for row in rows:
                at_t = np.arange(longest)
                spread.append(places[row][np.minimum(at_t, lengths[row] - 1)])
                real.append(at_t < lengths[row])
                own.append(real[-1] & (at_t >= starts[row].tokens))
            grids.append(Grid(len(rows), longest, start, lengths[rows[-1]] == longest))
        spread_G, real_G, own_G = np.concatenate(spread), np.concatenate(real), np.concatenate(own)
        back_N = np.empty(len(padded_N), np.int64)
        back_N[spread_G[own_G]] = np.flatnonzero(own_G)

        def moved(values: NDArray[Any]) -> torch.Tensor:
            return move(torch.from_numpy(values))

        return cls(
            width=width,
            lengths=tuple(lengths),
            tokens=len(padded_N),
            place_P=moved(place_P),
            padded_N=moved(padded_N),
            positions_1N=moved(np.concatenate(positions)[None]),
            grids=tuple(grids),
            spread_G=moved(spread_G),
            real_G=moved(real_G),
            token_G=moved(np.where(own_G, spread_G, -1)),
            back_N=moved(back_N),
            copies=tuple(
                (moved(at_G), moved(spread_G[at_G])) for at_G in _rounds(spread_G, np.flatnonzero(real_G & ~own_G))
            ),
        )

    def packed_places(self, at_n: torch.Tensor) -> torch.Tensor:
        """Return which of the N tokens are at the places `at_n` of [B,T-1], the last column left out."""
        return self.place_P.index_select(0, at_n + at_n // (self.width - 1))

    def packed(self, values_BT: torch.Tensor) -> torch.Tensor:
        """Return values [B,T,...] of the padded rows as [1,N,...]."""
        return values_BT.flatten(0, 1).index_select(0, self.padded_N)[None]


def shared_starts(tokens_BT: torch.Tensor, lengths: Sequence[int], groups: Sequence[str]) -> list[SharedStart]:
    """Return for each row the earlier row of its group that begins with the most of its tokens.

    Rows without a group share nothing.
    """
    tokens = tokens_BT.numpy()
    of_group: dict[str, list[int]] = {}
    found = []
    for row, (length, group) in enumerate(zip(lengths, groups, strict=True)):
        best = SharedStart()
        for other in of_group.get(group, ()):
            most = min(length, lengths[other])
            if most > best.tokens:
                differs = tokens[row, :most] != tokens[other, :most]
                best = max(best, SharedStart(other, int(differs.argmax()) if differs.any() else most), key=_tokens)
        found.append(best)
        if group:
            of_group.setdefault(group, []).append(row)
    return found


def _tokens(start: SharedStart) -> int:
    return start.tokens


def _rounds(spread_G: NDArray[np.int64], copies: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return `copies`, the places in the grids that have a shared token, in parts in which no token comes twice."""
    if not len(copies):
        return []
    order = np.argsort(spread_G[copies], kind="stable")
    tokens = spread_G[copies][order]
    first = np.flatnonzero(np.concatenate([[True], tokens[1:] != tokens[:-1]]))
    nth = np.arange(len(tokens)) - np.repeat(first, np.diff(np.append(first, len(tokens))))
    return [copies[order[nth == n]] for n in range(int(nth.max()) + 1)]


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Return the rows in grids of like length, the longest first."""
    grids: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not grids or lengths[row] < _NARROWEST * lengths[grids[-1][0]]:
            grids.append([])
        grids[-1].append(row)
    return grids
