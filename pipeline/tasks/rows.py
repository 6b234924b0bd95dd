"""Opens a data set: JSON lines, JSON, CSV, Parquet, also packed, or one of Hugging Face by name.

Guarantees that an error names file and line, and that a million rows take no more memory than their bytes: for JSON
lines only the places are kept. Parquet needs pyarrow (the extra `export`), a data set by name the package `datasets`.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.machine_memory import half_of_free_memory
from lachesis.pipeline.common.memory_bound import bounded_memory
from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.common.text_encoding import encoding_of
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.tasks.arrow_rows import ArrowRows, arrow_errors
from lachesis.pipeline.tasks.csv_rows import CsvTable
from lachesis.pipeline.tasks.json_files import read_json
from lachesis.pipeline.tasks.packed_files import PACKINGS, START_BYTES, ending_of, refuse_other_kind, unpacked
from lachesis.pipeline.tasks.row_stores import JsonRows, LinePlaces, LineRows, Rows, SequenceRows, rows_of_lines
from lachesis.schemas.errors import ConfigError

__all__ = ["ENDINGS", "read_file", "read_named"]

_JSON_LINES = (".jsonl", ".ndjson")
_CSV = (".csv", ".tsv")
_OTHER_KINDS = {
    (".zip", ".tar", ".tgz", ".tar.gz", ".7z"): ": unpack it",
    (".xlsx", ".xls", ".ods"): ": save the table as CSV",
    (".arrow", ".feather", ".pkl", ".pickle", ".h5", ".orc", ".avro"): ": write it as Parquet",
    (".yaml", ".yml", ".txt", ".xml"): ": write the rows as JSON lines",
}
"""What to do with files of other kinds, by the endings of their names."""
ENDINGS = (".jsonl", ".json", ".csv", ".parquet", ".ndjson", ".tsv")


def read_file(path: Path, names: frozenset[str], lines: LinePlaces | None = None) -> Rows:
    """Return the rows of a file; the ending of its name gives its kind.

    A further ending such as `.gz` means that it is packed. `names`: columns that will be read. `lines`: the places of
    JSON lines, if known (`LineRows.lines`).

    Raises `ConfigError` if the file is missing, of another kind, or damaged, `StartupError` without pyarrow.
    """
    packed = path.suffix.lower() in PACKINGS
    ending = ending_of(path)
    if ending not in ENDINGS:
        kinds = f"{', '.join(ENDINGS)}, or one of them and {', '.join(PACKINGS)}"
        cure = next((text for end, text in _OTHER_KINDS.items() if path.name.lower().endswith(end)), "")
        raise ConfigError(f"data set {path}: the name must end in {kinds}{cure}")
    most = half_of_free_memory()
    try:
        _check_regular(path)
        with bounded_memory(most):
            rows = (
                LineRows(path, lines) if lines and lines[0] else _opened(path, ending, names, packed=packed, most=most)
            )
    except MemoryError as error:
        raise ConfigError(
            f"data set {path}: its rows take more than {most >> 20} MiB of memory, half of what is free: split it, or "
            "make room"
        ) from error
    except OSError as error:
        raise ConfigError(f"data set {path.absolute()}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data set {path}: it cannot be decoded as UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8 "
            '(in Excel: "CSV UTF-8"), or as UTF-16 with its mark'
        ) from error
    if not len(rows):
        raise ConfigError(f"data set {path}: it has no rows")
    return rows


def _check_regular(path: Path) -> None:
    """Raise `OSError` if reading the file, or one in the folder, could block for ever or never end."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if not file.is_dir():
            open_regular_file(file).close()


def _opened(path: Path, ending: str, names: frozenset[str], *, packed: bool, most: int) -> Rows:
    """Return the rows. Raises `MemoryError` if they take more than `most` bytes, and the readers' errors."""
    if not path.is_dir():
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        refuse_other_kind(path, start, path.suffix.lower())
        if ending in _JSON_LINES and not packed and encoding_of(start) in {"utf-8", "utf-8-sig"}:
            return LineRows(path)
    if ending == ".parquet":
        table = _parquet(path, most if packed else None)
        if table.size_bytes > most:
            raise MemoryError
        return table
    data = unpacked(path, most) if packed else path.read_bytes()
    if ending in _JSON_LINES:
        return rows_of_lines(path, data)
    if ending in _CSV:
        cells = CsvTable(data, str(path), tabs=ending == ".tsv")
        return JsonRows(str(path), cells, repeated=cells.repeated)
    return read_json(path, data, names)


def _parquet(path: Path, packed_most: int | None) -> ArrowRows:
    """Return the rows of a Parquet file; `packed_most`: bytes that a packed one may hold, None: it is not packed."""
    parquet = _imported("pyarrow.parquet", install_command("export"))
    arrow = _imported("pyarrow", install_command("export"))
    source: Any = path if packed_most is None else arrow.BufferReader(unpacked(path, packed_most))
    try:
        table = parquet.read_table(path) if path.is_dir() else parquet.ParquetFile(source).read()
        return ArrowRows(table, str(path))
    except (MemoryError, ConfigError):
        raise  # errors of values or of pyarrow, too
    except arrow_errors() as error:
        raise ConfigError(f"data set {path}: {error}") from error


def read_named(name: str, subset: str | None, split: str) -> Rows:
    """Return the rows of a Hugging Face data set, by its name on the hub or by its folder.

    Raises `StartupError` without the package `datasets`, `ConfigError` if it cannot be loaded.
    """
    library = _imported("datasets", "pip install datasets")
    try:
        return SequenceRows(library.load_dataset(name, subset, split=split))
    except Exception as error:  # the package raises the errors of its many sources: they all mean the same here
        raise ConfigError(f"data set {name!r}, split {split!r}: {type(error).__name__}: {error!s:.300}") from error


def _imported(name: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise StartupError(f"this data set needs the package {error.name!r}: {install}") from error
