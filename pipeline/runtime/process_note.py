"""Keeps a note that other processes of this machine can read while its owner can run nothing.

It is memory without a name in any folder, so it ends with its process however that ends. Guarantees that a reader takes
at most `MAX_NOTE_BYTES`, and that one which cannot be read is none.
"""

import os
from pathlib import Path

__all__ = ["MAX_NOTE_BYTES", "ProcessNote", "read_note", "read_notes"]

MAX_NOTE_BYTES = 1 << 18
_PREFIX = "lachesis-"
_PROC = Path("/proc")


class ProcessNote:
    """One note of this process."""

    fd = -1

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(f"{_PREFIX}{name}")

    @property
    def size(self) -> int:
        """Its length, bytes."""
        return os.fstat(self.fd).st_size

    @property
    def written_ns(self) -> int:
        """When it was written last, Unix ns."""
        return os.fstat(self.fd).st_mtime_ns

    def read(self) -> bytes:
        """Return it."""
        return os.pread(self.fd, MAX_NOTE_BYTES, 0)

    def write(self, data: bytes) -> None:
        """Put `data` in the place of what it held; too much leaves it empty."""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)
        if 0 < len(data) <= MAX_NOTE_BYTES:
            os.write(self.fd, data)

    def close(self) -> None:
        """Give the memory back."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        self.close()


def read_note(pid: int, name: str) -> bytes:
    """Return the first note of that name of a process of this machine and user.

    Empty: there is none, or it says nothing.
    """
    return next(iter(read_notes(pid, name)), b"")


def read_notes(pid: int, name: str) -> list[bytes]:
    """Return all notes of that name of a process of this machine and user.

    Those that cannot be read are left out.
    """
    found: list[bytes] = []
    wanted = f"/memfd:{_PREFIX}{name} (deleted)"
    try:
        for link in (_PROC / str(pid) / "fd").iterdir():
            if str(link.readlink()) == wanted:
                with link.open("rb") as file:
                    found.append(file.read(MAX_NOTE_BYTES))
    except OSError:
        return found
    return found
