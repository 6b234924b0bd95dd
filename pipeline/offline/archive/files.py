"""Writes files that are whole or not there.

A file is written beside its place under `.partial`, synced, then moved into place.

Guarantees that a file at the requested path is a finished export, whatever was killed when, and that the second of two
writers of one file is refused.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from lachesis.pipeline.common.fsync import fsync
from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import ConfigError

__all__ = ["Format", "format_of", "whole_file"]

Format = Literal["jsonl", "parquet"]
_SUFFIXES: dict[str, Format] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def format_of(path: Path, given: str | None = None) -> Format:
    """Return the format that is given, or that the name implies. Raises `ConfigError` if it implies none."""
    found = _SUFFIXES.get(f".{given}" if given else path.suffix.lower())
    if found is None:
        raise ConfigError(f"{path}: which format? Name it *.parquet or *.jsonl, or give --format")
    return found


@contextmanager
def whole_file(path: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file to write to, which takes its place at `path` when the context ends well, and else goes.

    Raises `ConfigError` where something is there and `overwrite` is false, or nothing can be written there, and
    `InfrastructureError` where the disk is full.
    """
    partial = path.with_name(f"{path.name}.partial")
    _check(path, overwrite)
    with _describe_os_error(path):
        file = partial.open("ab")
    try:
        _lock(file, partial, path)
        try:
            with _describe_os_error(path):
                file.truncate(0)
                yield file
                file.flush()
                os.fsync(file.fileno())
                _check(path, overwrite)
                partial.replace(path)
                fsync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    finally:
        with suppress(OSError):  # the file could not be written, which was reported
            file.close()


def _lock(file: BinaryIO, partial: Path, path: Path) -> None:
    """Lock a file that was opened as `partial`, unless another export has moved it to `path` meanwhile."""
    busy = f"another export is writing {path}; wait for it, or choose another file"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(file.fileno()), partial.stat())
    except (BlockingIOError, FileNotFoundError) as error:
        raise ConfigError(busy) from error
    if not is_ours:
        raise ConfigError(busy)


def _check(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name a file in it")
    if path.exists() and not overwrite:
        raise ConfigError(f"{path} exists; give --overwrite to replace it, or choose another name")


@contextmanager
def _describe_os_error(path: Path) -> Iterator[None]:
    """Say of an error of the file system which file it is about, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise InfrastructureError(
                f"{path}: {error.strerror}; make room on its disk, or write to another one. Nothing was left behind"
            ) from error
        raise ConfigError(f"{path}: {error.strerror or error}") from error
