"""Unpacks files by the last ending of their names, and refuses files of another kind."""

import bz2
import gzip
import importlib
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError

__all__ = ["PACKINGS", "START_BYTES", "ending_of", "refuse_other_kind", "unpacked"]

PACKINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""The compression of a file, by the last ending of its name."""
START_BYTES = 64
"""Bytes at a file's start by which its kind is known."""
_PIECE_BYTES = 1 << 20
_STARTS = (
    (b"\x1f\x8b", ".gz"),
    (b"BZh", ".bz2"),
    (b"\xfd7zXZ\0", ".xz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
    (b"PAR1", ".parquet"),
)
_OTHERS = (
    (b"PK\x03\x04", "a zip archive or an Excel workbook: unpack it, or save the table as CSV"),
    (b"ARROW1", "an Arrow (Feather) file: write it as Parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS to the data, which was not downloaded: run `git lfs pull`"),
    (b"<!doctype html", "a web page: download the file itself"),
    (b"<html", "a web page: download the file itself"),
)


def ending_of(path: Path) -> str:
    """Return the ending of a file's name that says what it holds, without that of its packing."""
    return (path.with_suffix("") if path.suffix.lower() in PACKINGS else path).suffix.lower()


def refuse_other_kind(path: Path, start: bytes, ending: str) -> None:
    """Raise `ConfigError` if a file's first bytes show another kind than its `ending`."""
    for mark, own in _STARTS:
        if start.startswith(mark):
            if own == ending:
                return
            kind = f"packed by {PACKINGS[own]}" if own in PACKINGS else "a Parquet file"
            raise ConfigError(f"data set {path}: it is {kind}, so its name must end in {own}")
    for mark, what in _OTHERS:
        if start.lstrip().lower().startswith(mark.lower()):
            raise ConfigError(f"data set {path}: it is {what}")


def unpacked(path: Path, most_bytes: int) -> bytes:
    """Return what is packed in a file.

    It is read in pieces, so that a small file cannot fill the memory. Raises `MemoryError` where it holds more than
    `most_bytes`, `ConfigError` where it is damaged, `StartupError` without pyarrow.
    """
    packing = path.suffix.lower()
    pieces: list[bytes] = []
    size = 0
    with path.open("rb") as file:
        try:
            with _unpacking(file, packing) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    pieces.append(piece)
                    size += len(piece)
                    if size > most_bytes:
                        raise MemoryError
        except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
            raise ConfigError(f"data set {path}: it is no whole {PACKINGS[packing]} file: {error}") from error
    return b"".join(pieces)


def _unpacking(file: BinaryIO, packing: str) -> Any:
    """Return a stream of what is packed in `file`."""
    if packing != ".zst":
        openers: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers[packing](file)
    try:
        arrow = importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise StartupError(f"a .zst file needs the package pyarrow: {install_command('export')}") from error
    return arrow.input_stream(file, compression="zstd")
