"""Opens a data set: JSON lines, JSON, CSV, Parquet, gzip of them, or a Hugging Face data set by name.

Guarantees that what cannot be read is named with its file and line, and that a million rows take the memory of their
bytes at most: of JSON lines only the places are kept. Parquet needs pyarrow (the extra `export`), a data set by name
the package `datasets`.
"""

import csv
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from lachesis.pipeline.installation import install_command
from lachesis.pipeline.memory_bound import bounded_memory
from lachesis.pipeline.tasks.csv_rows import CsvTable
from lachesis.pipeline.tasks.row_stores import DatasetRow, JsonRows, LineRows, Rows, SequenceRows
from lachesis.pipeline.text_encoding import encoding_of, read_text
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["read_file", "read_named"]

_JSON_LINES = (".jsonl", ".ndjson")
_CSV = (".csv", ".tsv")
_ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".ndjson", ".tsv")


def read_file(path: Path, lines: tuple[bytes, bytes, bytes] | None = None) -> Rows:
    """Return the rows of a file, whose kind its name's ending says; with `.gz` after it, it is packed.

    `lines`: where those of JSON lines are, if that is known (`LineRows.lines`).

    Raises `ConfigError` where it is missing, of another kind, or damaged, `StartupError` without pyarrow.
    """
    packed = path.suffix.lower() == ".gz"
    ending = (path.with_suffix("") if packed else path).suffix.lower()
    if ending not in _ENDINGS:
        raise ConfigError(f"data set {path}: the name must end in {', '.join(_ENDINGS)}, or one of them and .gz")
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        with bounded_memory(most):
            rows = LineRows(path, lines) if lines is not None else _opened(path, ending, packed=packed, most=most)
    except MemoryError as error:
        raise ConfigError(
            f"data set {path}: its rows take more than {most >> 20} MiB of memory, half of this machine's: split it"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"data set {path}: it is no whole gzip file: {error}") from error
    except OSError as error:
        raise ConfigError(f"data set {path.absolute()}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data set {path}: it cannot be decoded as UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8 "
            '(in Excel: "CSV UTF-8"), or as UTF-16 with its mark'
        ) from error
    except csv.Error as error:
        raise ConfigError(f"data set {path}: {error}") from error
    if not len(rows):
        raise ConfigError(f"data set {path}: it has no rows")
    return rows


def _opened(path: Path, ending: str, *, packed: bool, most: int) -> Rows:
    """Return the rows. Raises `MemoryError` where they take more than `most` bytes, and what readers raise."""
    if ending == ".parquet":
        table = _parquet(path, packed=packed)
        if table.size_bytes > most:
            raise MemoryError
        return table
    if ending in _JSON_LINES and not packed:
        with path.open("rb") as file:
            start = file.read(4)
        if encoding_of(start) in {"utf-8", "utf-8-sig"}:
            return LineRows(path)
    data = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    if ending in _JSON_LINES:
        return _lines_of(path, data)
    if ending in _CSV:
        cells = CsvTable(data, str(path))
        return JsonRows(str(path), cells, repeated=cells.repeated)
    return _json(path, data)


def _lines_of(path: Path, data: bytes) -> Rows:
    if encoding_of(data[:4]) not in {"utf-8", "utf-8-sig"}:
        data = read_text(data).encode("utf-8", "surrogatepass")
    return JsonRows(str(path), (line for line in data.split(b"\n") if line.strip()))


def _json(path: Path, data: bytes) -> Rows:
    """Return the rows of a list of objects, of JSON lines, or of a data frame in one of pandas' forms."""
    text = read_text(data).encode("utf-8", "surrogatepass")
    first = text.lstrip()[:1]
    try:
        if first == b"[":
            return JsonRows(str(path), map(bytes, msgspec.json.decode(text, type=list[msgspec.Raw])))
    except (msgspec.MsgspecError, RecursionError) as error:
        found = _lenient(text)
        if isinstance(found, list):
            return SequenceRows(_objects(found, path))
        raise ConfigError(f"data set {path}: it is no JSON list of objects: {error}") from error
    if first == b"{":
        lines = text.strip().split(b"\n")
        if len(lines) > 1 and isinstance(_lenient(lines[0]), dict):
            return _lines_of(path, text)
        rows = _frame(_lenient(text))
        if rows is not None:
            return SequenceRows(_objects(rows, path))
    raise ConfigError(f"data set {path}: it is no JSON list of objects, and none of pandas' forms of a data frame")


def _lenient(data: bytes) -> Any:
    """Return what Python's own reader makes of JSON, `NaN` included; None of what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _frame(found: Any) -> list[Any] | None:
    """Return the rows of a data frame by columns, of {columns, data} or {data: [objects]}; else None."""
    if not isinstance(found, dict):
        return None
    data, columns = found.get("data"), found.get("columns")
    if isinstance(data, list) and isinstance(columns, list):
        whole = all(isinstance(row, list) and len(row) == len(columns) for row in data)
        return [dict(zip(map(str, columns), row, strict=True)) for row in data] if whole else None
    if isinstance(data, list):
        return data
    if len(found) == 1 and isinstance(only := next(iter(found.values())), list):
        return only
    return _columns_of(found) if found else None


def _columns_of(found: dict[str, Any]) -> list[Any] | None:
    """Return the rows of columns that are lists of one length, or have the same labels; else None."""
    columns = list(found.values())
    if all(isinstance(cells, list) and len(cells) == len(columns[0]) for cells in columns):
        return [dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True)]
    if all(isinstance(cells, dict) and list(cells) == list(columns[0]) for cells in columns):
        return [{name: cells[label] for name, cells in found.items()} for label in columns[0]]
    return None


def _objects(rows: list[Any], path: Path) -> list[DatasetRow]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"data set {path} row {number}: it is {row!r:.60}, no object")
    return rows


def _parquet(path: Path, *, packed: bool) -> "_TableRows":
    parquet = _imported("pyarrow.parquet", install_command("export"))
    arrow = _imported("pyarrow", install_command("export"))
    source: Any = path if not packed else arrow.BufferReader(gzip.decompress(path.read_bytes()))
    try:
        table = parquet.read_table(path) if path.is_dir() else parquet.ParquetFile(source).read()
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"data set {path}: {error}") from error
    return _TableRows(table)


class _TableRows(Rows):
    """The rows of an Arrow table, each made when it is asked for."""

    def __init__(self, table: Any) -> None:
        names = list(table.column_names)
        self.repeated = frozenset(name for name in names if names.count(name) > 1)
        self._table = table.combine_chunks()
        self.size_bytes = int(table.nbytes)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> DatasetRow:
        table = self._table
        return {name: cells[index].as_py() for name, cells in zip(table.column_names, table.columns, strict=True)}

    def __iter__(self) -> Iterator[DatasetRow]:
        for batch in self._table.to_batches(max_chunksize=4096):
            columns = [cells.to_pylist() for cells in batch.columns]
            for cells in zip(*columns, strict=True):
                yield dict(zip(self._table.column_names, cells, strict=True))


def read_named(name: str, subset: str | None, split: str) -> Rows:
    """Return the rows of a Hugging Face data set, by its name on the hub or by its folder.

    Raises `StartupError` without the package `datasets`, `ConfigError` where it cannot be had.
    """
    library = _imported("datasets", "pip install datasets")
    try:
        return SequenceRows(library.load_dataset(name, subset, split=split))
    except Exception as error:  # the package raises what its many sources raise: they all mean the same here
        raise ConfigError(f"data set {name!r}, split {split!r}: {type(error).__name__}: {error!s:.300}") from error


def _imported(name: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StartupError(f"this data set needs the package {error.name!r}: {install}") from error
