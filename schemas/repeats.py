"""Leaves rows of columns out that are the same elsewhere in them, and puts them back.

Pure. The rows of a group's columns are its tokens. Sequences that begin with the same tokens, such as the branches of a
conversation or the samples of one prompt, travel with these rows once. Guarantees that what is put back is bounded
before it is allocated, whatever the sender claims, and that nothing but `SchemaError` is raised.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from lachesis.schemas.errors import SchemaError

__all__ = ["REPEATS_SINCE", "RepeatedRows", "are_repeated", "leave_out", "put_back", "repeated_starts", "rows_in_all"]

REPEATS_SINCE: Final = 4
"""The wire version whose readers put repeated rows back."""

_MIN_ROWS = 32
"""Rows from which leaving them out is worth its time."""
_MIN_SHARE = 1 / 8
"""Share of all rows from which leaving them out is."""
_MAX_GROWTH = 32
"""How many times the stored rows there may be in all. Columns of more travel whole."""


class RepeatedRows(msgspec.Struct, frozen=True, array_like=True):
    """The `rows` rows from `at` on are those from `source` on, which comes after them, and are left out."""

    at: int
    source: int
    rows: int


def repeated_starts(tokens: bytes, cuts: Sequence[int], most: Sequence[int]) -> list[RepeatedRows]:
    """Return the rows with which sequences begin as a later one does.

    `tokens`: int32 [T]; `cuts` [n+1]: where each of the n sequences begins and ends; `most` [n]: how many of its first
    rows may be left out. [] where that is not worth its time, or more than a reader puts back.
    """
    later: list[bytes] = []
    """The sequences after the one looked at, in order, so that the neighbours of a place begin most like it."""
    starts: list[int] = []
    found = []
    for i in range(len(most) - 1, -1, -1):
        own = tokens[4 * cuts[i] : 4 * cuts[i + 1]]
        wanted = own[: 4 * most[i]]
        place = bisect_left(later, wanted)
        if most[i] >= _MIN_ROWS:
            begun = wanted[: 4 * _MIN_ROWS]
            near = [k for k in (place - 1, place) if 0 <= k < len(later) and later[k].startswith(begun)]
            if near:
                rows, source = max((_rows_alike(wanted, later[k]), starts[k]) for k in near)
                found.append(RepeatedRows(cuts[i], source, rows))
        place = bisect_left(later, own, lo=place)
        later.insert(place, own)
        starts.insert(place, cuts[i])
    total, left_out = cuts[-1], sum(one.rows for one in found)
    if left_out < _MIN_SHARE * total or total > _MAX_GROWTH * (total - left_out):
        return []
    return found[::-1]


def are_repeated(data: bytes, repeats: Sequence[RepeatedRows], width: int) -> list[bool]:
    """Return of each repeat whether its rows in `data`, of `width` bytes, are those of its source."""
    view = memoryview(data)

    def rows(begin: int, one: RepeatedRows) -> memoryview:
        return view[begin * width : (begin + one.rows) * width]

    return [rows(one.at, one) == rows(one.source, one) for one in repeats]


def leave_out(data: bytes, repeats: Sequence[RepeatedRows], width: int) -> bytes:
    """Return the rows of `width` bytes in `data` without those that are repeated."""
    cuts = [0, *(edge for one in repeats for edge in (one.at, one.at + one.rows)), len(data) // width]
    view = memoryview(data)
    return b"".join(view[begin * width : end * width] for begin, end in zip(cuts[::2], cuts[1::2], strict=True))


def put_back(data: bytes, repeats: Sequence[RepeatedRows], stored: int, width: int, *, as_zeros: bool = False) -> bytes:
    """Return the rows of which `leave_out` made `data`, which has `stored` ones.

    `rows_in_all` must have allowed the repeats. Data of another length than theirs is returned as it is: a column may
    travel whole, and the check of its length refuses any other. `as_zeros`: the rows that were left out are zero, not
    those of their source.
    """
    if width < 1 or len(data) != stored * width:
        return data
    total = stored + sum(one.rows for one in repeats)
    found = memoryview(bytearray(total * width))
    end, left = total, len(data)
    for one in reversed(repeats):  # a source comes later, so it is whole by then
        begin = one.at + one.rows
        size = (end - begin) * width
        found[begin * width : end * width] = data[left - size : left]
        if not as_zeros:
            found[one.at * width : begin * width] = found[one.source * width : (one.source + one.rows) * width]
        end, left = one.at, left - size
    found[: end * width] = data[:left]
    return bytes(found)


def rows_in_all(stored: int, repeats: Sequence[RepeatedRows]) -> int:
    """Return how many rows there are with the repeated ones.

    Raises `SchemaError` unless each repeat lies behind the one before it and ahead of its source, or if there are too
    many rows to put back.
    """
    total = stored + sum(one.rows for one in repeats)
    end = 0
    for one in repeats:
        if one.rows < 1 or one.at < end or one.at + one.rows > one.source or one.source + one.rows > total:
            raise SchemaError(
                f"repeats: {one.rows} rows at {one.at} cannot be those at {one.source} of {total}: repeats are "
                "ascending, and their source comes after them"
            )
        end = one.at + one.rows
    if total > _MAX_GROWTH * stored:
        raise SchemaError(f"repeats: {stored} rows that become {total}, more than {_MAX_GROWTH} times as many")
    return total


def _rows_alike(one: bytes, other: bytes) -> int:
    """Return with how many equal tokens both begin."""
    n = min(len(one), len(other)) // 4
    differ = np.frombuffer(one, "<i4", n) != np.frombuffer(other, "<i4", n)
    first = int(differ.argmax())
    return first if differ[first] else n
