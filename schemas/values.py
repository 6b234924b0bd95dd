"""Checks of field values beyond their types: number ranges and free-form data.

The ranges are msgspec constraints, so the decoder refuses what breaks them and the JSON Schemas say them. An encoder
checks nothing: every writer of data that it did not make itself calls `Event.check`.
"""

import math
import re
import sys
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE
from lachesis.schemas.errors import SchemaError

__all__ = [
    "Count",
    "Finite",
    "Seq",
    "check_decoded_integers",
    "check_integers",
    "check_plain",
    "convert_plain",
    "from_json",
    "text_length",
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

_LONG = re.compile(rb"[0-9]{19}")
"""In what has none of it, every integer fits into 64 bits."""

MAX_DEPTH: Final = 32
"""Levels of free-form data; raters and terminals walk it recursively."""


def check_plain(what: str, value: Any, *, finite: bool = False) -> None:
    """Raise `SchemaError` unless `value` is made of JSON types or bytes, with text keys.

    `finite`: its numbers must be, as those of settings are. It may be nested `MAX_DEPTH` levels deep. The check walks
    level by level, so no nesting is too deep for itself.
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
            elif finite and isinstance(item, float) and not math.isfinite(item):
                raise SchemaError(f"{what}: holds {item}, which is no finite number")
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
        value = msgspec.json.decode(data)
    except UNREADABLE:
        return
    check_decoded_integers(what, value)


def check_decoded_integers(what: str, value: Any) -> None:
    """Raise `SchemaError` with its place where the decoded JSON `value` holds an integer beyond 64 bits."""
    level = [("", value)]
    while level:
        place, value = level.pop()
        if isinstance(value, dict):
            level += [(f"{place}.{key!s:.40}" if place else f"{key!s:.40}", one) for key, one in value.items()]
        elif isinstance(value, list):
            level += [(f"{place}[{i}]", one) for i, one in enumerate(value)]
        elif isinstance(value, int) and not -_MAX_INTEGER - 1 <= value <= 2 * _MAX_INTEGER + 1:
            size = value.bit_length()
            raise SchemaError(f"{what}: {place[-200:] or 'it'} is an integer of {size} bits; 64 is the most")


def text_length(value: Any) -> int:
    """Return how many characters the texts in a free-form value have, keys among them.

    What is no text counts as one character. `check_plain` says what such a value is.
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
    except UNREADABLE as error:
        raise SchemaError(f"{what} cannot be read: {str(error)[:MAX_ERROR_CHARS]}") from error


def from_json(what: str, kind: type[T], data: bytes) -> T:
    """Return the `kind` that the JSON `data` holds.

    Raises `SchemaError` naming `what` where it holds none, or an integer beyond 64 bits.
    """
    check_integers(what, data)
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise SchemaError(f"{what}: {str(error)[:MAX_ERROR_CHARS]}") from error


def convert_plain(what: str, kind: type[T], value: Any) -> T:
    """Return the plain `value` as a `kind`. Raises `SchemaError` naming `what` where it does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (*UNREADABLE, AttributeError, TypeError) as error:  # the latter of what has no plain form, an array say
        raise SchemaError(f"{what} is malformed: {str(error)[:MAX_ERROR_CHARS]}") from error
