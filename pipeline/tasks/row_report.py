"""Counts the problems of the rows of a data set, by kind, with the first examples of each. Pure.

A row that cannot be used or scored is left out and counted here; the data set is refused only if no row is left.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.schemas.errors import ConfigError

__all__ = ["RowReport", "first_of_each", "twins"]

_MAX_EXAMPLES = 3
_MAX_KINDS = 20


class RowReport:
    """Report on the rows of the data set called `where`."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._left_out: dict[str, tuple[int, list[str]]] = {}
        self._first = ""
        self._said: list[str] = []

    def leave_out(self, row: str, why: str) -> None:
        """Count a row that is left out, by its name. The part of `why` before a colon is its kind."""
        self._first = self._first or f"{self._where} row {row}: {why}"
        kind = why.partition(":")[0][:80]
        if kind not in self._left_out and len(self._left_out) >= _MAX_KINDS:
            kind = "other reasons"
        count, examples = self._left_out.get(kind, (0, []))
        if len(examples) < _MAX_EXAMPLES:
            examples.append(f"row {row}: {why}")
        self._left_out[kind] = count + 1, examples

    def say(self, text: str) -> None:
        """Add another message to report."""
        self._said.append(f"{self._where}: {text}")

    def refuse_all_left_out(self) -> None:
        """Raise `ConfigError` with the reason of the first row. Called if no row is left."""
        raise ConfigError(self._first or f"{self._where}: it has no rows")

    def texts(self, rows: int) -> list[str]:
        """Return the messages to report about this many rows."""
        count = sum(number for number, _ in self._left_out.values())
        if not count:
            return list(self._said)
        examples = [text for _, some in self._left_out.values() for text in some]
        shown = "; ".join(text[:160] for text in examples[: _MAX_EXAMPLES + len(self._left_out) - 1])
        kinds = ", ".join(f"{number} x {kind}" for kind, (number, _) in self._left_out.items())
        head = f"{self._where}: {count} of {rows} rows are left out, and are no tasks: {kinds}"
        return [f"{head}. The first: {shown}", *self._said]


def first_of_each(keys: Keys) -> NDArray[np.int64]:
    """Return, for each key, the index of the first equal key, int64 [N]."""
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    found: NDArray[np.int64] = first[place].astype(np.int64)
    return found


def twins(first: NDArray[np.int64], differ: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
    """Yield pairs (first, later) of indices with equal keys for which `differ` is true."""
    for later in np.flatnonzero(first != np.arange(len(first))):
        if differ(int(first[later]), int(later)):
            yield int(first[later]), int(later)
