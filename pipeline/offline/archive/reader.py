"""Reads files of rollouts as groups, one after the other, each with its place.

Memory holds one group at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from lachesis.pipeline.common.memory_bound import each_within
from lachesis.pipeline.common.small_files import open_regular_file
from lachesis.pipeline.extension import added
from lachesis.pipeline.offline.archive.files import Format
from lachesis.pipeline.offline.archive.jsonl import read_lines, read_row
from lachesis.pipeline.offline.archive.logic.foreign_lines import ImportAssumptions, ReadLine, epoch_of
from lachesis.pipeline.offline.archive.logic.row import RolloutRow, group_of
from lachesis.pipeline.offline.archive.parquet import count_rows, read_rows
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["PlacedGroup", "check_kind", "read_groups"]

MAX_READING_BYTES = 2 << 30
"""Memory that reading a group and the rows beside it may take; 64 rows of a million tokens take half."""


class PlacedGroup(NamedTuple):
    """A group, or why there is none, with `place` in the file, and the share of the file that is read."""

    place: str
    group: RolloutGroup | None
    error: str | None
    share: float


def check_kind(path: Path, kind: Format, *, foreign: str | None) -> None:
    """Raise `ConfigError` where the file cannot be read, or is plainly of another kind than said.

    `foreign` names the project that it is of; None: `lachesis export` wrote it.
    """
    try:
        size = path.stat().st_size
        with open_regular_file(path) as file:
            start = file.read(4)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not size:
        raise ConfigError(f"{path} is empty: it holds no rollouts")
    if (start == b"PAR1") is not (kind == "parquet"):
        raise ConfigError(f"{path} is {'Parquet' if start == b'PAR1' else 'no Parquet file'}, whatever it is called")
    if kind == "parquet":
        if foreign is not None:
            raise ConfigError(f"{path}: files of {foreign} are JSON lines, and this is Parquet")
        return
    first = next(read_lines(path), None)
    try:
        keys = set(msgspec.json.decode(first.data, type=dict[str, msgspec.Raw])) if first else set()
    except (msgspec.MsgspecError, RecursionError):
        return  # reported with its line
    if "schema" in keys and foreign is not None:
        raise ConfigError(f"{path} was written by `lachesis export`: leave --from out")
    if keys and "schema" not in keys and foreign is None:
        known = " or ".join(added("importers")) or "none is installed"
        raise ConfigError(
            f"{path} was not written by `lachesis export`: name the project that it is of, with --from ({known}) and "
            "--env NAME"
        )


def read_groups(
    path: Path, kind: Format, *, run: str, foreign: tuple[ReadLine, ImportAssumptions] | None
) -> Iterator[PlacedGroup]:
    """Yield the groups of a file, as groups of `run`; `foreign`: how lines of another project are read.

    Raises `ConfigError` where the file as a whole cannot be read.
    """
    try:
        if foreign is not None:
            groups = _foreign(path, *foreign)
        else:
            groups = _assembled(path, _parquet(path) if kind == "parquet" else _jsonl(path), run)
        yield from each_within(groups, MAX_READING_BYTES)
    except MemoryError as error:
        raise ConfigError(
            f"{path}: reading its next rows takes more than {MAX_READING_BYTES >> 20} MiB of memory, which no group of "
            "sequences needs; if it is Parquet, write it with fewer rows in each row group"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except SchemaError as error:
        raise ConfigError(str(error)) from error


def _foreign(path: Path, from_line: ReadLine, assumed: ImportAssumptions) -> Iterator[PlacedGroup]:
    status, epoch = path.stat(), None
    assumed = msgspec.structs.replace(assumed, started_ns=status.st_mtime_ns)
    for line in read_lines(path):
        if epoch is None:
            epoch = epoch_of(line.data)
        place, share = f"{path}:{line.number}", line.end / status.st_size
        try:
            yield PlacedGroup(place, from_line(line.data, line.number, path, epoch, assumed), None, share)
        except SchemaError as error:
            yield PlacedGroup(place, None, str(error), share)


class _ReadRow(NamedTuple):
    """A row, or why there is none, by its number from 1."""

    number: int
    row: RolloutRow | SchemaError
    share: float


def _jsonl(path: Path) -> Iterator[_ReadRow]:
    size = path.stat().st_size
    for line in read_lines(path):
        try:
            row: RolloutRow | SchemaError = read_row(line.data)
        except SchemaError as error:
            row = error
        yield _ReadRow(line.number, row, line.end / size)


def _parquet(path: Path) -> Iterator[_ReadRow]:
    total = count_rows(path)
    for number, row in read_rows(path):
        yield _ReadRow(number, row, number / total)


def _assembled(path: Path, rows: Iterator[_ReadRow], run: str) -> Iterator[PlacedGroup]:
    """Yield a group as soon as a row of another one comes."""
    waiting: list[_ReadRow] = []
    for read in rows:
        row = read.row
        if isinstance(row, SchemaError):
            yield from _group(path, waiting, run)
            waiting = []
            yield PlacedGroup(f"{path}:{read.number}", None, str(row), read.share)
            continue
        if waiting and (waiting[0].row.group != row.group or row.sequence == 0):  # type: ignore[union-attr]
            yield from _group(path, waiting, run)
            waiting = []
        waiting.append(read)
    yield from _group(path, waiting, run)


def _group(path: Path, reads: list[_ReadRow], run: str) -> Iterator[PlacedGroup]:
    if not reads:
        return
    first, last = reads[0], reads[-1]
    place = f"{path}:{first.number}" + (f"-{last.number}" if last.number > first.number else "")
    try:
        group = group_of([read.row for read in reads if isinstance(read.row, RolloutRow)], run=run)
    except SchemaError as error:
        yield PlacedGroup(place, None, str(error), last.share)
    else:
        yield PlacedGroup(place, group, None, last.share)
