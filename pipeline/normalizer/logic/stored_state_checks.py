"""Checks the normalizer's stored state before it is loaded.

From the plain values of a snapshot or a commit's delta it makes structs that keep every rule the normalizer relies on:
windows are numbered, sums can be those of real values, and text that stands for a number is a number of bounded length.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lachesis.pipeline.normalizer.logic.accumulator import MAX_ABS_VALUE, MomentAccumulator, quantize
from lachesis.pipeline.normalizer.logic.ranks import MAX_CELLS, MAX_SHIFT, RankCounts
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import Seq, convert_plain

__all__ = ["SavedDelta", "SavedState", "saved_delta", "saved_state"]

# 80 digits hold the squares of 2^63 values of the largest magnitude
_Digits = Annotated[str, Meta(pattern=r"\A-?[0-9]{1,80}\Z")]
_Sums = tuple[_Digits, _Digits, _Digits, _Digits, _Digits, _Digits]
_Keys = dict[str, _Sums]
# shift, groups, cells: at most MAX_CELLS of 19 and 12 digits
_Counts = tuple[
    Annotated[int, Meta(ge=0, le=MAX_SHIFT)],
    Annotated[int, Meta(ge=0, le=1 << 48)],
    Annotated[str, Meta(pattern=r"\A(-?[0-9a-f]{1,19}:[0-9a-f]{1,12}( (?!\Z)|\Z))*\Z", max_length=MAX_CELLS * 34)],
]
_Ranks = dict[str, _Counts]
_Number = Annotated[int, Meta(ge=0, le=1 << 48)]
_MAX_QUANTIZED = 2 * quantize(MAX_ABS_VALUE)
_Window = Annotated[str, Meta(pattern=r"\A[0-9]{1,18}\Z")]


class SavedState(msgspec.Struct, frozen=True):
    """`EnvNormalizer.state_dict`."""

    version: int
    env: str
    window: int
    base: _Number
    ring: dict[_Window, _Keys]
    recent: list[tuple[Seq, str]]
    emitted: list[Seq]
    ranks: dict[_Window, _Ranks]
    peaks: dict[_Window, Annotated[float, Meta(ge=0, le=1)]]
    watermark: Seq
    """The lowest sequence that is not folded."""
    starts: list[Seq]
    """The first sequences of the newest folded windows."""
    tail: list[tuple[Seq, str]]
    """The newest folded groups, from the last one with scores on: none of these has any."""


class _ClosedWindow(msgspec.Struct, frozen=True):
    window: _Number
    keys: _Keys
    members: Annotated[list[tuple[Seq, str]], Meta(min_length=1)]
    ranks: _Ranks = {}
    scored: int = 0
    """Sequence of the last member with scores; 0: none has any."""


class SavedDelta(msgspec.Struct, frozen=True):
    """The delta of `EnvNormalizer.step`."""

    version: int
    base: _Number
    closed: list[_ClosedWindow]
    emitted: list[Seq]
    width: int
    """Groups a window."""
    watermark: Seq


def saved_state(value: Any) -> SavedState:
    """Return the state. Raises `SchemaError`."""
    state = convert_plain("normalizer state", SavedState, value)
    _check(state.ring.values())
    _check_ranks(state.ranks.values())
    if sorted({*state.starts}) != state.starts or len(state.starts) > state.base:
        raise SchemaError("normalizer state: windows that do not follow one another")
    folded = [*state.starts, *(seq for seq, _ in (*state.recent, *state.tail))]
    if any(seq >= state.watermark for seq in folded):
        raise SchemaError(f"normalizer state: a folded group from sequence {state.watermark} on, where none is folded")
    if any(int(window) >= state.base for window in (*state.ring, *state.ranks, *state.peaks)):
        raise SchemaError(f"normalizer state: a window beyond {state.base}, the first that is open")
    return state


def saved_delta(value: Any) -> SavedDelta:
    """Return the delta. Raises `SchemaError`."""
    delta = convert_plain("normalizer delta", SavedDelta, value)
    _check(part.keys for part in delta.closed)
    _check_ranks(part.ranks for part in delta.closed)
    if any(seq >= delta.watermark for part in delta.closed for seq, _ in part.members):
        raise SchemaError(f"normalizer delta: a folded group from sequence {delta.watermark} on, where none is folded")
    if any(part.window >= delta.base for part in delta.closed):
        raise SchemaError(f"normalizer delta: a window beyond {delta.base}, the first that is open")
    return delta


def _check(windows: Iterable[_Keys]) -> None:
    for keys in windows:
        for key, fields in keys.items():
            sums = MomentAccumulator.from_list(fields)
            possible = (
                0 <= sums.groups <= sums.count
                and sums.low <= sums.high
                and sums.count * sums.squares >= sums.total**2  # Cauchy-Schwarz: no variance is negative
                and sums.count * sums.low <= sums.total <= sums.count * sums.high
            )
            if not possible or (sums.count == 0 and any((sums.squares, sums.low, sums.high))):
                raise SchemaError(f"normalizer state: the sums of {key[:40]!r} are those of no values")


def _check_ranks(windows: Iterable[_Ranks]) -> None:
    for ranks in windows:
        for key, fields in ranks.items():
            counts = RankCounts.from_list(fields)
            values = sum(counts.cells.values())
            possible = (
                len(fields[2].split()) == len(counts.cells) <= MAX_CELLS
                and all(counts.cells.values())
                and bool(values) <= counts.groups <= values
                and all(abs(cell << counts.shift) <= _MAX_QUANTIZED for cell in counts.cells)
            )
            if not possible:
                raise SchemaError(f"normalizer state: the ranks of {key[:40]!r} are those of no values")
