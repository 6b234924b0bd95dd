"""Reads the rows of a data set: JSON lines, JSON, CSV, Parquet, or a Hugging Face data set by name.

Guarantees that what cannot be read is named with its file and line. Parquet needs pyarrow (the extra `export`), a data
set by name the package `datasets`.
"""

import csv
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from lachesis.pipeline.installation import install_command
from lachesis.pipeline.memory_bound import bounded_memory
from lachesis.pipeline.nearest import nearest
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["DatasetRow", "column", "read_file", "read_named"]

DatasetRow = dict[str, Any]
"""One row, by column."""


def read_file(path: Path) -> list[DatasetRow]:
    """Return the rows of a file, whose kind its name's ending says: .jsonl, .json, .csv or .parquet.

    Raises `ConfigError` where it is missing, of another kind, or damaged, `StartupError` without pyarrow.
    """
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"data set {path}: the name must end in {', '.join(readers)}")
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        with bounded_memory(most):
            rows = list(reader(path))
    except MemoryError as error:
        raise ConfigError(
            f"data set {path}: its rows take more than {most >> 20} MiB of memory, half of this machine's: split it"
        ) from error
    except OSError as error:
        raise ConfigError(f"data set {path.absolute()}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"data set {path}: {error}") from error
    if not rows:
        raise ConfigError(f"data set {path}: it has no rows")
    return rows


def read_named(name: str, subset: str | None, split: str) -> list[DatasetRow]:
    """Return the rows of a Hugging Face data set, by its name on the hub or by its folder.

    Raises `StartupError` without the package `datasets`, `ConfigError` where it cannot be had.
    """
    library = _imported("datasets", "pip install datasets")
    try:
        return [dict(row) for row in library.load_dataset(name, subset, split=split)]
    except Exception as error:  # the package raises what its many sources raise: they all mean the same here
        raise ConfigError(f"data set {name!r}, split {split!r}: {type(error).__name__}: {error!s:.300}") from error


def _json_lines(path: Path) -> Iterator[DatasetRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(f"{path} line {number}", line)


def _json(path: Path) -> Iterator[DatasetRow]:
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"data set {path}: it is no JSON list of objects: {error}") from error
    for number, row in enumerate(rows, 1):
        yield _row(f"{path} row {number}", bytes(row))


def _row(where: str, data: bytes) -> DatasetRow:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ConfigError(f"data set {where}: {error}") from error


def _csv(path: Path) -> Iterator[DatasetRow]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines, strict=True)
        for row in reader:
            if None in row or None in row.values():
                raise ConfigError(f"data set {path} line {reader.line_num}: other columns than the first line names")
            yield row


def _parquet(path: Path) -> Iterator[DatasetRow]:
    parquet = _imported("pyarrow.parquet", install_command("export"))
    arrow = _imported("pyarrow", install_command("export"))
    try:
        rows: list[DatasetRow] = parquet.read_table(path).to_pylist()
    except arrow.ArrowInvalid as error:
        raise ConfigError(f"data set {path}: {error}") from error
    return iter(rows)


def _imported(name: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StartupError(f"this data set needs the package {error.name!r}: {install}") from error


def column(row: DatasetRow, name: str, where: str) -> Any:
    """Return a row's value in a column.

    Raises `ConfigError` naming the nearest column where there is none.
    """
    if name not in row:
        raise ConfigError(f"{where}: it has no column {name!r}{nearest(name, row)}; it has {', '.join(row)}")
    return row[name]
