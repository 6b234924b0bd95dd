"""Checks of field values beyond their types: number ranges and free-form data.

The ranges are msgspec constraints, so the decoder refuses what breaks them and the JSON Schemas say them. An encoder
checks nothing: every writer of data that it did not make itself calls `Event.check`.
"""

import re
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Annotated, Any, Final, TypeVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from lachesis.schemas.errors import DataError, SchemaError

__all__ = [
    "Count",
    "Finite",
    "Seq",
    "check_integers",
    "check_kind",
    "check_plain",
    "columns_of",
    "convert_plain",
    "from_json",
    "listed",
    "numbers_or_missing",
    "plain_numbers",
    "unpack",
]

_MAX_INTEGER: Final = (1 << 63) - 1

Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""A float that is neither NaN nor infinite; what is missing is None."""
Count = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
"""A number of things, an index, or Unix time, ns."""
Seq = Annotated[int, Meta(ge=1, le=_MAX_INTEGER)]
"""The sequence of a stored message."""

T = TypeVar("T")

_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)

_LONG = re.compile(rb"[0-9]{19}")
"""In what has none of it, every integer fits into 64 bits."""

MAX_DEPTH: Final = 32
"""Levels of free-form data; raters and terminals walk it recursively."""


def check_plain(what: str, value: Any) -> None:
    """Raise `SchemaError` unless `value` consists of JSON types or bytes, with text keys.

    It may be nested `MAX_DEPTH` levels deep.

    Walks level by level, so that no nesting is too deep for the check itself.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise SchemaError(f"{what}: a key is not text")
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
            elif not (item is None or isinstance(item, bool | int | float | str | bytes)):
                raise SchemaError(f"{what}: holds a {type(item).__name__}, which JSON has not")
        level = below
    if level:
        raise SchemaError(f"{what}: nested deeper than {MAX_DEPTH} levels")


def check_integers(what: str, data: bytes | memoryview) -> None:
    """Raise `SchemaError` with its place where the JSON `data` holds an integer beyond 64 bits.

    Nothing here counts so far, and msgpack cannot hold it. Data that is no JSON passes: its reader says so.
    """
    if _LONG.search(data) is None:
        return
    try:
        level = [("", msgspec.json.decode(data))]
    except _UNREADABLE:
        return
    while level:
        place, value = level.pop()
        if isinstance(value, dict):
            level += [(f"{place}.{key!s:.40}" if place else f"{key!s:.40}", one) for key, one in value.items()]
        elif isinstance(value, list):
            level += [(f"{place}[{i}]", one) for i, one in enumerate(value)]
        elif isinstance(value, int) and not -_MAX_INTEGER - 1 <= value <= 2 * _MAX_INTEGER + 1:
            size = value.bit_length()
            raise SchemaError(f"{what}: {place[-200:] or 'it'} is an integer of {size} bits; 64 is the most")


def listed(what: str, values: Any) -> list[Any]:
    """Return the items of `values`, of which `what` names one, as a list.

    Raises `DataError` where there are none to be had in an order: of a number, a text, a table, a set.
    """
    try:
        if not isinstance(values, str | bytes | bytearray | set | frozenset | Mapping):
            return list(values)
    except TypeError:  # also an array of no dimension, which has an iterator that cannot iterate
        pass
    raise DataError(f"{what}: {values!r:.80} is no sequence of these; give a list, or a flat array.")


def columns_of(what: str, table: Any) -> dict[str, list[float | None]]:
    """Return the columns of `table`, by name, as lists of equal length; `what` names one number of them.

    Raises `DataError` as `numbers_or_missing`, and unless `table` is one of columns of equal length.
    """
    if not isinstance(table, Mapping):
        raise DataError(f"{what}: {table!r:.80} is no table; give columns by name.")
    columns = {name: numbers_or_missing(f"{what} of {name!s:.40}", column) for name, column in table.items()}
    if len({len(column) for column in columns.values()}) > 1:
        raise DataError(f"{what}: columns have lengths { {name: len(column) for name, column in columns.items()} }.")
    return columns


def check_kind(what: str, value: Any, kind: type) -> None:
    """Raise `DataError` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise DataError(f"{what} is {value!r:.80}; give one of type {kind.__name__}.")


def numbers_or_missing(what: str, values: Any, *, largest: float = sys.float_info.max) -> list[float | None]:
    """Return `values` as a list in which what is missing is None.

    `what` is the name of one of them. Raises `DataError` unless they are a flat sequence of None and of numbers within
    +-`largest`.
    """
    found = listed(what, values)
    for i, value in enumerate(found):
        is_number = isinstance(value, Real)
        # a number of NumPy's with fewer bits takes `largest` for infinite, and itself for no greater
        plain = value.item() if isinstance(value, np.generic) else value
        if value is not None and not (is_number and abs(plain) <= largest):
            raise DataError(
                f"{what} {i} is {value!r:.80}; give finite numbers"
                f"{'' if largest == sys.float_info.max else f' within +-{largest:g}'}, a missing one is None."
            )
    return [None if value is None else float(value) for value in found]


def plain_numbers(what: str, values: Any, *, largest: float = sys.float_info.max) -> list[float]:
    """Return `values` as a list. Raises `DataError` as `numbers_or_missing`, and where one is missing."""
    found = numbers_or_missing(what, values, largest=largest)
    if None in found:
        raise DataError(f"{what} {found.index(None)} is None; leave out what is missing.")
    return cast("list[float]", found)


def text_length(value: Any) -> int:
    """Return the characters of all texts in a free-form value, keys among them.

    What is no text counts as one character.
    See `check_plain` for what it may be.
    """
    length, level = 0, [value]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            level += item.values()
            length += sum(map(len, item))
        elif isinstance(item, list | tuple):
            level += item
        elif isinstance(item, str):
            length += len(item)
        elif item is not None:
            length += 1
    return length


def unpack(what: str, data: bytes) -> Any:
    """Return what the msgpack `data` holds. Raises `SchemaError` naming `what`."""
    try:
        return msgspec.msgpack.decode(data)
    except _UNREADABLE as error:
        raise SchemaError(f"{what} cannot be read: {error}") from error


def from_json(what: str, kind: type[T], data: bytes) -> T:
    """Return the `kind` that the JSON `data` holds.

    Raises `SchemaError` naming `what`, as `check_integers`, too.
    """
    check_integers(what, data)
    try:
        return msgspec.json.decode(data, type=kind)
    except _UNREADABLE as error:
        raise SchemaError(f"{what}: {str(error)[:500]}") from error


def convert_plain(what: str, kind: type[T], value: Any) -> T:
    """Return the plain `value` as a `kind`. Raises `SchemaError` naming `what` where it does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (*_UNREADABLE, AttributeError, TypeError) as error:  # the latter of what has no plain form, an array say
        raise SchemaError(f"{what} is malformed: {str(error)[:500]}") from error
