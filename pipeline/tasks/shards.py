"""Reads several files as one data set: those of a list, of a glob or of a folder.

Guarantees that rows come file by file in the order of the names, in which part-2 is before part-10, and that a row is
named with its file.
"""

import bisect
import glob
import os
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

from lachesis.pipeline.tasks.packed_files import ending_of
from lachesis.pipeline.tasks.row_stores import DatasetRow, LinePlaces, Rows
from lachesis.pipeline.tasks.rows import ENDINGS, read_file
from lachesis.schemas.errors import ConfigError

__all__ = ["find_shards", "read_files"]

_SPLIT = re.compile(r"(?<![a-z])(train|test|valid|validation|val|dev|eval)(?![a-z])", re.IGNORECASE)
_ADDRESS = re.compile(r"(?:^|/)([a-z0-9]{2,}):/", re.IGNORECASE)
"""An address, also where a configuration has made a path of it."""
_SAVED = frozenset({"dataset_info.json", "state.json"})
"""What `save_to_disk` of the package datasets writes beside its Arrow files."""
_USE_GLOB = "name those that you mean by a glob, folder/train-*.jsonl say, or as a list"


def find_shards(path: str | list[str]) -> list[Path]:
    """Return the files that a path, a glob, a folder, or a list of them names.

    Raises `ConfigError` where that is none, and where a folder holds what is no one data set.
    """
    found = [file for one in ([path] if isinstance(path, str) else path) for file in _files_of(one)]
    if not found:
        raise ConfigError("dataset: path is an empty list")
    if twice := sorted({str(file) for file in found if found.count(file) > 1}):
        raise ConfigError(f"dataset: path names {twice[0]} twice")
    return found


def read_files(files: Sequence[Path], names: frozenset[str], lines: Sequence[LinePlaces] = ()) -> Rows:
    """Return the rows of all files. Raises as `read_file`.

    `lines`: the places of JSON lines in each, if known.
    """
    known: Sequence[LinePlaces | None] = lines or [None] * len(files)
    shards = [read_file(file, names, places) for file, places in zip(files, known, strict=True)]
    return shards[0] if len(shards) == 1 else _ShardRows(files, shards)


def _files_of(path: str) -> list[Path]:
    path = os.path.expanduser(path)  # noqa: PTH111 - it stays as it is for a user without a home
    if address := _ADDRESS.search(path):
        cure = 'give name = "OWNER/NAME" instead of path' if address[1] == "hf" else "download it first"
        given = path[address.start(1) :]
        raise ConfigError(f"data set {given}: path is a file or folder of this machine, no address; {cure}")
    place = Path(path)
    if place.is_dir() and place.suffix.lower() != ".parquet":
        return _files_in(place)
    if place.exists() or not glob.has_magic(path):
        return [place]
    found = sorted((Path(one) for one in glob.glob(path, recursive=True) if not Path(one).is_dir()), key=_order)  # noqa: PTH207 - of an absolute path
    if not found:
        raise ConfigError(f"data set {path}: no file has such a name")
    return found


def _files_in(folder: Path) -> list[Path]:
    shards = [file for file in folder.iterdir() if file.is_file() and file.name[0] not in "._" and _kind(file)]
    if {file.name for file in shards} >= _SAVED or (folder / "dataset_dict.json").exists():
        raise ConfigError(
            f"data set {folder}: the folder was written by save_to_disk of the package datasets: write it as Parquet, "
            f"datasets.load_from_disk({str(folder)!r}).to_parquet(...)"
        )
    if not shards:
        raise ConfigError(f"data set {folder}: the folder holds no file that ends in {', '.join(ENDINGS)}")
    for what, kinds in (
        ("files of several kinds", {_kind(file) for file in shards}),
        ("several splits", {str(_SPLIT.findall(file.stem)[:1]).lower() for file in shards}),
    ):
        if len(kinds) > 1:
            names = ", ".join(file.name for file in sorted(shards, key=_order)[:4])
            raise ConfigError(f"data set {folder}: the folder holds {what} ({names}...): {_USE_GLOB}")
    return sorted(shards, key=_order)


def _kind(file: Path) -> str | None:
    ending = ending_of(file)
    return ending if ending in ENDINGS else None


def _order(file: Path) -> list[tuple[bool, int, str]]:
    parts = re.split(r"(\d+)", str(file))
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


class _ShardRows(Rows):
    """The rows of several files, one file after the other."""

    def __init__(self, files: Sequence[Path], shards: Sequence[Rows]) -> None:
        self._files = files
        self._shards = shards
        self._ends = [*accumulate(map(len, shards))]
        self.repeated = frozenset().union(*(shard.repeated for shard in shards))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> DatasetRow:
        shard, row = self._place(index)
        return self._shards[shard][row]

    def __iter__(self) -> Iterator[DatasetRow]:
        return chain.from_iterable(self._shards)

    def with_repeats(self, names: Sequence[str]) -> Iterator[tuple[DatasetRow, str | None]]:
        return chain.from_iterable(shard.with_repeats(names) for shard in self._shards)

    def lines(self) -> list[LinePlaces]:
        return [places for shard in self._shards for places in shard.lines()]

    def name_of(self, index: int) -> str:
        shard, row = self._place(index)
        return f"{row + 1} of {self._files[shard]}"

    def _place(self, index: int) -> tuple[int, int]:
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - (self._ends[shard - 1] if shard else 0)
