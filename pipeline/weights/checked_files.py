"""Remembers which weights files of a folder were checked, for all processes of a machine.

Guarantees that a file counts as checked only while it is the same one (inode, size, time of the last change) and the
system has not been restarted: after a power loss a file may lack data that was written to it. No torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json

__all__ = ["CheckedFiles"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Record(msgspec.Struct, frozen=True):
    """The identities of checked files by name, and the boot of the system in which they were checked."""

    boot: str
    files: dict[str, tuple[int, int, int]]


class CheckedFiles:
    """The checked files of `folder`, which one process at a time changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / ".checked.json"
        self._boot = _BOOT_ID.read_text().strip()

    def __contains__(self, path: Path) -> bool:
        identity = _identity(path)
        return identity is not None and self._read().get(path.name) == identity

    def add(self, path: Path) -> None:
        """Record that a file was checked, and forget files that no longer exist."""
        known = {name: one for name, one in self._read().items() if (self._folder / name).exists()}
        identity = _identity(path)
        if identity is None:
            return
        replace_file(self._file, msgspec.json.encode(_Record(self._boot, known | {path.name: identity})))

    def _read(self) -> dict[str, tuple[int, int, int]]:
        try:
            record = from_json(str(self._file), _Record, read_small_file(self._file))
        except (OSError, SchemaError):
            return {}  # the files are checked again
        return record.files if record.boot == self._boot else {}


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
