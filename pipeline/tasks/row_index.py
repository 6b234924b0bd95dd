"""Keeps the index of a large data set for the other processes of a run.

The index is in the user's cache folder, keyed by each file's path, size and times and the environment's parameters: a
changed file has another index. Guarantees that a missing or damaged index, or a folder that cannot be written, costs
only time.
"""

import hashlib
import logging
import os
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lachesis.pipeline.common.fsync import fsync, partial_of
from lachesis.pipeline.tasks.row_stores import LinePlaces

__all__ = ["RowIndex", "index_file", "load_index", "save_index"]

log = logging.getLogger("lachesis")

_VERSION = 8
"""Increased whenever the same rows give another index."""
_LARGE_BYTES = 4 << 20
"""A smaller file is read in a second or less."""
_MAX_KEPT = 16
_LEFT_S = 3600.0
"""Age at which a partial file is one whose writer was killed."""


class RowIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The rows to use, their keys, and the messages about the others.

    `lines`: the places of the lines of each file. All numbers have the machine's byte order.
    """

    lines: list[LinePlaces]
    places: bytes
    keys: bytes
    answered: bool = True
    """Whether the rows have answers."""
    doubts: list[str]

    def is_whole(self, files: int) -> bool:
        """Whether its parts belong together, and to so many files."""
        rows = len(self.places) // array("q").itemsize
        sizes = array("q").itemsize, array("I").itemsize, array("I").itemsize
        return (
            rows > 0
            and len(self.keys) == 8 * rows
            and len(self.lines) == files
            and all(len({len(part) / size for part, size in zip(one, sizes, strict=True)}) == 1 for one in self.lines)
        )


def index_file(files: Sequence[Path], params: Mapping[str, Any]) -> Path | None:
    """Return the path of the index of files, for an environment with these parameters.

    None if the files are small together or one is missing, and if there is no folder for the index.
    """
    folder = _folder()
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    if folder is None or sum(one.st_size for one in found) < _LARGE_BYTES:
        return None
    stamps = [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]
    names = [os.fspath(file.absolute()) for file in files]
    key = msgspec.json.encode([_VERSION, names, stamps, dict(params)], order="deterministic")
    return folder / f"{hashlib.blake2b(key, digest_size=16).hexdigest()}.index"


def load_index(file: Path | None, files: int) -> RowIndex | None:
    """Return the index of so many files; None if there is no complete one."""
    if file is None:
        return None
    try:
        found = msgspec.msgpack.decode(file.read_bytes(), type=RowIndex)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.is_whole(files) else None


def save_index(file: Path | None, index: RowIndex) -> None:
    """Store an index, and delete the oldest ones.

    Unlike `replace_file`, with a partial file for each process: several may store the same index at once.
    """
    if file is None:
        return
    partial = partial_of(file).with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(msgspec.msgpack.encode(index))
        fsync(partial)
        partial.replace(file)
        kept = sorted(file.parent.glob("*.index"), key=lambda one: one.stat().st_mtime_ns, reverse=True)
        left = [one for one in file.parent.glob("*.index.*") if one.stat().st_mtime < time.time() - _LEFT_S]
        for old in (*kept[_MAX_KEPT:], *left):
            old.unlink(missing_ok=True)
    except OSError as error:
        log.info("the index of a data set is not kept, so each process looks through it: %s", error)


def _folder() -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("HOME") and f"{os.environ['HOME']}/.cache")
    return Path(home) / "lachesis" / "datasets" if home and Path(home).is_absolute() else None
