"""Reads tables of text as spreadsheets and data frames write them. Pure.

Guarantees that a cell of any length is read; that a line with other columns than those of the first line is refused by
its number; and that a column of whole numbers that pandas wrote as floats, because a value is missing in it, has its
whole numbers back.
"""

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from lachesis.pipeline.common.text_encoding import encoding_of
from lachesis.pipeline.tasks.row_stores import DatasetRow
from lachesis.schemas.errors import ConfigError

__all__ = ["CsvTable"]

_WHOLE = re.compile(r"[-+]?\d+\.0")
_NAMED_SEPARATOR = re.compile(r'"?sep=(?P<separator>[^"\r\n])"?\r?\n')
"""A line before the table that Excel writes and reads."""
_QUOTED = re.compile(r'"[^"]*"')
_MISSING = frozenset({"", "nan", "NaN", "<NA>"})
_SEPARATORS = ",;\t|"


class CsvTable:
    """A table of text. Iterating it raises `ConfigError` if a line has other columns than the first."""

    def __init__(self, data: bytes, where: str, *, tabs: bool = False) -> None:
        """Read the names of the columns. `tabs`: they separate the columns if the first line has any."""
        csv.field_size_limit(sys.maxsize)
        self._data = data
        self._where = where
        self._encoding = encoding_of(data[:4])
        with self._text() as text:
            first = text.readline()
        named = _NAMED_SEPARATOR.fullmatch(first)
        self._skipped = 0 if named is None else 1
        if named is not None:
            self._separator = named["separator"]
        else:
            self._separator = "\t" if tabs and "\t" in first else _separator(first)
        _, names = next(self._records(), (0, []))
        self._names = [name.lstrip("\ufeff") for name in names]  # the mark of a second file appended to the first
        self.repeated = frozenset(name for name, count in Counter(self._names).items() if count > 1)
        """Names that several columns have."""

    def __iter__(self) -> Iterator[DatasetRow]:
        whole = self._whole_columns()
        for line, cells in islice(self._records(), 1, None):
            if not cells:
                continue
            if len(cells) != len(self._names):
                raise ConfigError(
                    f"data set {self._where} line {line}: other columns than the first line names, "
                    f"{len(cells)} instead of {len(self._names)}"
                )
            for place in whole:
                cells[place] = cells[place].removesuffix(".0")
            yield dict(zip(self._names, cells, strict=True))

    def _text(self) -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(self._data), encoding=self._encoding, newline="")

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the cells of each record, with the number of the line in which it begins."""
        reader = csv.reader(self._text(), strict=True, delimiter=self._separator)
        for _ in range(self._skipped):
            next(reader)
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise ConfigError(
                    f"data set {self._where} line {line}: a cell that begins with a quotation mark is not ended by one "
                    f'({error}); write "" for each quotation mark inside of such a cell'
                ) from error
            yield line, cells

    def _whole_columns(self) -> list[int]:
        """Return the columns in which every cell is a whole number written as a float, or missing."""
        if b".0" not in self._data.replace(b"\0", b""):
            return []
        left, seen = set(range(len(self._names))), set()
        for _, cells in islice(self._records(), 1, None):
            for place in list(left):
                cell = cells[place] if place < len(cells) else ""
                if _WHOLE.fullmatch(cell):
                    seen.add(place)
                elif cell not in _MISSING:
                    left.discard(place)
            if not left:
                break
        return sorted(left & seen)


def _separator(first: str) -> str:
    """Return the separator of columns: the candidate that occurs most often in the first line."""
    outside = _QUOTED.sub("", first)
    return max(_SEPARATORS, key=lambda one: (outside.count(one), one == ","))
