"""Reads what a caller gives a function: numbers of Python, NumPy or torch, columns, tables. Pure.

What does not fit raises an error that names it, says what it is and what to give instead.
"""

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any, cast

from lachesis.pipeline.common.real_number import real_number
from lachesis.schemas.errors import ConfigError, DataError

__all__ = [
    "MAX_INTEGER",
    "check_kind",
    "listed",
    "number_column",
    "number_columns",
    "plain_numbers",
    "setting_number",
    "table_of",
    "whole_number",
]

MAX_INTEGER = (1 << 63) - 1
"""Largest number that msgpack and the project's states hold."""
_PLAIN = (list, tuple)


def check_kind(what: str, value: Any, kind: type) -> None:
    """Raise `DataError` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise DataError(f"{what} is {value!r:.80}; give one of type {kind.__name__}.")


def listed(what: str, values: Any) -> list[Any]:
    """Return the items of `values`, of which `what` names one, as a list.

    Raises `DataError` where there are none to be had in an order: of a number, a text, a table, a set.
    """
    if type(values) in _PLAIN:
        return list(values)
    try:
        if not isinstance(values, str | bytes | bytearray | set | frozenset | Mapping):
            return list(values)
    except TypeError:  # also an array of no dimension, which has an iterator that cannot iterate
        pass
    raise DataError(f"{what}: {values!r:.80} is no sequence of these; give a list, or a flat array.")


def number_column(what: str, values: Any, *, largest: float = sys.float_info.max) -> list[float | None]:
    """Return a flat sequence of real numbers, each as `real_number` reads it; None is a missing one.

    `what` names one of them. Raises `DataError` with its place on what is no number within +-`largest`.
    """
    listed_values = listed(what, values)
    if _are_plain_floats(listed_values, largest):
        return listed_values
    column: list[float | None] = []
    limit = "" if largest == sys.float_info.max else f" within +-{largest:g}"
    for place, value in enumerate(listed_values):
        if value is None:
            column.append(None)
            continue
        mend = f"give finite numbers{limit}, a missing one is None."
        try:
            number = real_number(value)
        except ValueError as error:
            raise DataError(f"{what} {place} is {error}; {mend}") from error
        if not abs(number) <= largest:
            raise DataError(f"{what} {place} is {number!r}; {mend}")
        column.append(number)
    return column


def _are_plain_floats(values: list[float], largest: float) -> bool:
    """Return whether all are Python's own floats within +-`largest`: what `real_number` would return as they are."""
    if {*map(type, values)} != {float} or not all(map(math.isfinite, values)):
        return False
    return -largest <= min(values) and max(values) <= largest


def plain_numbers(what: str, values: Any, *, largest: float = sys.float_info.max) -> list[float]:
    """Return `values` as a list. Raises `DataError` as `number_column`, and where one is missing."""
    found = number_column(what, values, largest=largest)
    if None in found:
        raise DataError(f"{what} {found.index(None)} is None; leave out what is missing.")
    return cast("list[float]", found)


def number_columns(what: str, table: Any, *, largest: float = sys.float_info.max) -> dict[str, list[float | None]]:
    """Return the columns of a table by name, each as `number_column` reads it.

    Raises `DataError` on what is no table, and on columns of different lengths.
    """
    columns = {
        name: number_column(f"{what} of {name}", column, largest=largest)
        for name, column in table_of(f"{what}s", table).items()
    }
    if len({len(column) for column in columns.values()}) > 1:
        lengths = {name: len(column) for name, column in columns.items()}
        raise DataError(f"{what}s are of different numbers of samples: {lengths}; give None for a missing one.")
    return columns


def table_of(what: str, table: Any) -> Mapping[str, Any]:
    """Return `table`. Raises `DataError` on what is no table, or has a name that is no text."""
    if not isinstance(table, Mapping):
        raise DataError(f"{what}: {table!r:.80} is no table; give a dictionary by name.")
    for name in table:
        if not isinstance(name, str):
            raise DataError(f"{what}: the name {name!r:.80} is no text.")
    return table


def whole_number(what: str, value: Any, *, least: int = 0) -> int:
    """Return a whole number of Python, NumPy or torch.

    Raises `DataError` on another value, and on one below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise DataError(f"{what} is {value!r:.80}; give a whole number.") from error
    if not least <= number <= MAX_INTEGER:
        raise DataError(f"{what} is {number!r:.40}; give a whole number of {least} or more, below 2^63.")
    return number


def setting_number(what: str, value: Any) -> float:
    """Return the finite number that a setting is. Raises `ConfigError` on what is none."""
    try:
        (number,) = number_column(what, [value])
    except DataError as error:
        raise ConfigError(f"{what} is {value!r:.80}; give a finite number.") from error
    if number is None:
        raise ConfigError(f"{what} is None; give a finite number.")
    return number
