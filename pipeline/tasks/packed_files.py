"""Unpacks files by the last ending of their names, and refuses files of another kind."""

import bz2
import gzip
import importlib
import lzma
import zlib
from pathlib import Path

from lachesis.pipeline.common.installation import install_command
from lachesis.schemas.errors import ConfigError, StartupError

__all__ = ["PACKINGS", "START_BYTES", "refuse_other_kind", "unpacked"]

PACKINGS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""The compression of a file, by the last ending of its name."""
START_BYTES = 64
"""Bytes at a file's start that show its kind."""
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


def unpacked(path: Path) -> bytes:
    """Return the unpacked content of a file.

    Raises `ConfigError` if it is damaged, `StartupError` without pyarrow.
    """
    packing = path.suffix.lower()
    data = path.read_bytes()
    try:
        if packing == ".zst":
            return _zstd(data)
        return {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}[packing](data)
    except (EOFError, zlib.error, lzma.LZMAError, ValueError, OSError) as error:
        raise ConfigError(f"data set {path}: it is no whole {PACKINGS[packing]} file: {error}") from error


def _zstd(data: bytes) -> bytes:
    try:
        arrow = importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise StartupError(f"a .zst file needs the package pyarrow: {install_command('export')}") from error
    with arrow.input_stream(arrow.py_buffer(data), compression="zstd") as stream:
        found: bytes = stream.read()
        return found
