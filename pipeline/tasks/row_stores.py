"""Keeps many rows of a data set cheaply: by their places in the file, or as packed JSON.

Guarantees that a row stays as it was when the file was opened: a file that is changed meanwhile is refused by name.
"""

import json
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.text_encoding import UTF8_MARK, encoding_of, read_text
from lachesis.schemas.errors import ConfigError

__all__ = [
    "MAX_ROW_BYTES",
    "DatasetRow",
    "JsonRows",
    "LinePlaces",
    "LineRows",
    "Rows",
    "SequenceRows",
    "parsed_row",
    "rows_of_lines",
]

DatasetRow = dict[str, Any]
"""One row, by column."""
LinePlaces = tuple[bytes, bytes, bytes]
"""Where the lines of a file start, how long they are and their numbers; empty where the rows are not in lines."""
MAX_ROW_BYTES = 256 << 20
"""A larger row is no task, and as Python values it would take many times as much."""
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 16 << 20
_decode = msgspec.json.Decoder(DatasetRow).decode


class Rows:
    """Rows by their number, from 0. `repeated`: names that more than one column has."""

    repeated: frozenset[str] = frozenset()

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> DatasetRow:
        raise NotImplementedError

    def __iter__(self) -> Iterator[DatasetRow]:
        return (self[index] for index in range(len(self)))

    def lines(self) -> list[LinePlaces]:
        """Return the places of the lines in each file, by which it is opened faster the next time."""
        return [(b"", b"", b"")]

    def name_of(self, index: int) -> str:
        """Return how people call a row: by its number from 1, with its file where there are several."""
        return str(index + 1)

    def with_repeats(self, names: Sequence[str]) -> Iterator[tuple[DatasetRow, str | None]]:
        """Yield each row, with the one of `names` that occurs twice in it as a key of one JSON object."""
        return ((row, None) for row in self)


def _repeated_key(data: bytes, quoted: Sequence[tuple[bytes, str, bool]]) -> str | None:
    for key, name, is_inner in quoted:
        if data.count(key) > 1 and _has_twice(data, name, is_inner=is_inner):
            return name
    return None


def _has_twice(data: bytes, name: str, *, is_inner: bool) -> bool:
    """Return whether the object of a row, or one inside it, has a key twice."""
    counts: list[int] = []  # the outermost object ends last

    def count(pairs: list[tuple[str, Any]]) -> None:
        counts.append(sum(key == name for key, _ in pairs))

    json.loads(data.removeprefix(UTF8_MARK), object_pairs_hook=count)
    return (max(counts[:-1], default=0) if is_inner else counts[-1]) > 1


class _StoredRows(Rows):
    """Rows that are kept as JSON."""

    def _raws(self) -> Iterator[tuple[bytes, str]]:
        """Yield the JSON of each row, and its place."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[DatasetRow]:
        return (parsed_row(data, where) for data, where in self._raws())

    def with_repeats(self, names: Sequence[str]) -> Iterator[tuple[DatasetRow, str | None]]:
        inner = [name.rpartition(".")[2] for name in names if "." in name]
        wanted = [*((name, False) for name in names), *((name, True) for name in inner)]
        quoted = [(msgspec.json.encode(name), name, is_inner) for name, is_inner in wanted]
        return ((parsed_row(data, where), _repeated_key(data, quoted)) for data, where in self._raws())


class LineRows(_StoredRows):
    """JSON lines that stay in their file: 8 bytes of memory a row."""

    def __init__(self, path: Path, lines: LinePlaces | None = None) -> None:
        """Find the lines, or use the earlier result of `lines` for the same file."""
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        self._starts = array("q")
        self._lengths = array("I")
        self._numbers = array("I")
        if lines is None:
            self._find_lines()
        else:
            for column, data in zip((self._starts, self._lengths, self._numbers), lines, strict=True):
                column.frombytes(data)
        self._stamp = self._now()

    def lines(self) -> list[LinePlaces]:
        return [(self._starts.tobytes(), self._lengths.tobytes(), self._numbers.tobytes())]

    def _find_lines(self) -> None:
        place = 0
        with os.fdopen(os.dup(self._file), "rb") as lines:
            number = 0
            while line := lines.readline(MAX_ROW_BYTES + 1):
                number += 1
                if len(line) > MAX_ROW_BYTES:
                    raise _too_large(f"{self._path} line {number}")
                if line.strip().removeprefix(UTF8_MARK):
                    self._starts.append(place)
                    self._lengths.append(len(line))
                    self._numbers.append(number)
                place += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> DatasetRow:
        return parsed_row(self._read(index, index + 1), f"{self._path} line {self._numbers[index]}")

    def _raws(self) -> Iterator[tuple[bytes, str]]:
        end = 0
        while (first := end) < len(self):
            end, latest = first + 1, min(first + _ROWS_AT_ONCE, len(self))
            while end < latest and self._starts[end] + self._lengths[end] - self._starts[first] <= _BYTES_AT_ONCE:
                end += 1
            lines = (line for line in self._read(first, end).split(b"\n") if line.strip().removeprefix(UTF8_MARK))
            for index, line in zip(range(first, end), lines, strict=True):
                yield line, f"{self._path} line {self._numbers[index]}"

    def _read(self, first: int, end: int) -> bytes:
        """Return the lines of these rows. Raises `ConfigError` if the file has changed."""
        if self._now() != self._stamp:
            raise ConfigError(
                f"data set {self._path}: it was written to while it is in use; start again to read it as it is now"
            )
        start = self._starts[first]
        return os.pread(self._file, self._starts[end - 1] + self._lengths[end - 1] - start, start)

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns


class JsonRows(_StoredRows):
    """Rows as JSON, one after another in one piece of memory."""

    def __init__(self, where: str, rows: Iterable[bytes | DatasetRow], repeated: frozenset[str] = frozenset()) -> None:
        self._where = where
        self.repeated = repeated
        self._data = bytearray()
        self._ends = array("q", [0])
        for row in rows:
            self._data += row if isinstance(row, bytes) else msgspec.json.encode(row)
            self._ends.append(len(self._data))
            if self._ends[-1] - self._ends[-2] > MAX_ROW_BYTES:
                raise _too_large(f"{where} row {len(self)}")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> DatasetRow:
        return parsed_row(self._raw(index), f"{self._where} row {index + 1}")

    def _raws(self) -> Iterator[tuple[bytes, str]]:
        return ((self._raw(index), f"{self._where} row {index + 1}") for index in range(len(self)))

    def _raw(self, index: int) -> bytes:
        return bytes(memoryview(self._data)[self._ends[index] : self._ends[index + 1]])


def rows_of_lines(path: Path, data: bytes) -> JsonRows:
    """Return the rows of JSON lines that are in memory, in any encoding."""
    if encoding_of(data[:4]) not in {"utf-8", "utf-8-sig"}:
        data = read_text(data).encode("utf-8", "surrogatepass")
    return JsonRows(str(path), (line for line in data.split(b"\n") if line.strip()))


class SequenceRows(Rows):
    """Rows that are kept elsewhere: a list, or a data set of the package `datasets`."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> DatasetRow:
        return dict(self._rows[index])

    def __iter__(self) -> Iterator[DatasetRow]:
        return map(dict, self._rows)


def _too_large(where: str) -> ConfigError:
    return ConfigError(f"data set {where}: it is larger than {MAX_ROW_BYTES >> 20} MiB, which no task needs")


def parsed_row(data: bytes, where: str) -> DatasetRow:
    """Return the object in a line. `NaN` and numbers of any length are read as Python reads them.

    Raises `ConfigError` if it holds none.
    """
    data = data.removeprefix(UTF8_MARK)
    try:
        return _decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            return found
        cure = ""
        if data.lstrip()[:2] in {b'["', b"[["}:
            cure = "; a row is an object with the names of its columns: from pandas, write orient='records'"
        elif data.count(b"}\r") > 1 or b"}\r{" in data:
            cure = "; its lines end in CR alone: write them with LF"
        elif data.lstrip()[:1] == b"[":
            cure = "; a row is an object: if the file is one JSON list of them, its name must end in .json"
        elif "trailing characters" in str(error):
            cure = "; each object must stand in a line of its own, with nothing behind it"
        elif data.strip() == b"{":
            cure = "; each object must stand in one line: write the rows without indentation"
        elif "truncated" in str(error):
            cure = "; the line is cut off, as where a download was: fetch the file again, or remove the line"
        elif isinstance(error, UnicodeDecodeError):
            cure = "; save the file as UTF-8"
        raise ConfigError(f"data set {where}: {error}{cure}") from error
