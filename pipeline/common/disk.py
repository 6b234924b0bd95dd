"""Writes to a disk that may be full.

A write waits for room, says so once, and goes on when there is room again.

Guarantees that only a lack of space is waited out (every other error is raised), that each shortage and its end are
logged once for each file system, and that a heartbeat can show what this process waits for (`SHORTAGES`).
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import anyio
import anyio.to_thread

from lachesis.pipeline.common.fsync import partial_of
from lachesis.pipeline.common.os_errors import errno_of
from lachesis.pipeline.common.ticks import sleep_until_tick

__all__ = [
    "SHORTAGES",
    "DeferredFile",
    "DiskRoom",
    "DiskShortage",
    "DiskShortages",
    "device_of",
    "disk_room",
    "is_disk_full",
    "missing_bytes",
    "retry_until_room",
    "unwritable_place",
    "write_if_room",
    "write_when_room",
    "write_when_room_sync",
]

log = logging.getLogger("lachesis")

T = TypeVar("T")

RETRY_S = 0.5
"""Between two looks at a disk that is full."""
MAX_RESERVE_BYTES = 64 << 20
"""A large write leaves as much room as it takes, at most this, to other writers: to JetStream above all, which does not
recover by itself from a disk that was full."""
_BLOCK_BYTES = 4096
"""What the smallest file takes."""
_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskRoom(NamedTuple):
    """What a file system has. `total_bytes` is 0 where it does not say; `inodes`: whether one more file can be made."""

    free_bytes: int
    total_bytes: int
    inodes: bool = True


class DiskShortage(NamedTuple):
    """A write to `path` that waits for room; `lack` says what is missing."""

    path: Path
    lack: str

    def __str__(self) -> str:
        return f"the disk is full: {self.lack} to write {self.path}; make room there, and it goes on by itself"


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error says that a disk, or the share of one that a quota allows, is full."""
    return errno_of(error) in _ERRNOS


def missing_bytes(room: DiskRoom, needed_bytes: int) -> int:
    """Return how many bytes more must be free for a write of `needed_bytes`, 0 if it may begin."""
    if not room.total_bytes:
        return 0
    return max(0, needed_bytes + min(needed_bytes, MAX_RESERVE_BYTES) - room.free_bytes)


def unwritable_place(folder: Path) -> Path | None:
    """Return the folder, or the nearest above it, if it keeps `folder` from being written; else None."""
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    return None if place.is_dir() and os.access(place, os.W_OK | os.X_OK) else place


def disk_room(path: Path) -> DiskRoom:
    """Return what the file system has that `path`, or the nearest folder above it that exists, lies on."""
    for folder in (path, *path.absolute().parents):
        with suppress(FileNotFoundError, NotADirectoryError):
            found = os.statvfs(folder)
            inodes = found.f_favail > 0 or not found.f_files
            return DiskRoom(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize, inodes)
    return DiskRoom(0, 0)


class DiskShortages:
    """The writes of this process that wait for room."""

    def __init__(self) -> None:
        self._waiting: dict[Path, DiskShortage] = {}
        self._said: dict[int, tuple[Path, float]] = {}
        """By file system: the path that was named, and since when, of `time.monotonic`."""

    def begin(self, shortage: DiskShortage) -> None:
        """Take in that a write waits, or what it still misses."""
        self._waiting[shortage.path] = shortage  # where it was in the order, if it waited before
        device = device_of(shortage.path)
        if device not in self._said:
            self._said[device] = shortage.path, time.monotonic()
            log.warning("%s", shortage)

    def end(self, path: Path) -> None:
        """Take in that a write waits no more: it is done, or given up."""
        if self._waiting.pop(path, None) is None:
            return
        waiting = {device_of(other) for other in self._waiting}
        for device in self._said.keys() - waiting:
            named, since = self._said.pop(device)
            log.warning("%s: the write waits for room no more, after %.1f s", named, time.monotonic() - since)

    @property
    def longest_wait_text(self) -> str | None:
        """The write that waits longest, as text; None: none does."""
        return next((str(shortage) for shortage in self._waiting.values()), None)


SHORTAGES = DiskShortages()
"""Those of this process."""


def device_of(path: Path) -> int:
    """Return which file system `path`, or the nearest folder above it that exists, lies on."""
    for folder in (path, *path.absolute().parents):
        with suppress(OSError):
            return folder.stat().st_dev
    return 0


def _attempt(path: Path, write: Callable[[], T], needed_bytes: int) -> tuple[T] | DiskShortage:
    """Write if there seems to be room; return what came of it, or what is missing."""
    missing = missing_bytes(disk_room(path), needed_bytes)
    if missing:
        return DiskShortage(path, f"at least {missing:,} bytes missing")
    try:
        return (write(),)
    except Exception as error:
        if not is_disk_full(error):
            raise
        return DiskShortage(path, _lack(disk_room(path), needed_bytes, errno_of(error)))


def _lack(room: DiskRoom, needed_bytes: int, number: int | None) -> str:
    if number == errno.EDQUOT:
        return "a quota is used up"
    if not room.inodes:
        return "no inode is free"
    return f"at least {max(_BLOCK_BYTES, missing_bytes(room, needed_bytes)):,} bytes missing"


async def write_when_room(path: Path, write: Callable[[], T], *, needed_bytes: int = 0) -> T:
    """Return what `write` does, in a thread, once `path` has room for `needed_bytes`.

    `write` is called again after each time that it met a full disk, so it must leave nothing behind when it does. All
    its other errors are raised.
    """
    try:
        while isinstance(done := await anyio.to_thread.run_sync(_attempt, path, write, needed_bytes), DiskShortage):
            SHORTAGES.begin(done)
            await anyio.sleep(RETRY_S)
    finally:
        SHORTAGES.end(path)
    return done[0]


def write_if_room(path: Path, write: Callable[[], object]) -> DiskShortage | None:
    """Write unless the disk of `path` is full; then return the shortage, for callers that cannot wait.

    `write` must leave nothing behind when it meets a full disk. All its other errors are raised.
    """
    done = _attempt(path, write, 0)
    return done if isinstance(done, DiskShortage) else None


def write_when_room_sync(path: Path, write: Callable[[], T]) -> T:
    """As `write_when_room`, where there is no event loop that it would stop."""
    try:
        while isinstance(done := _attempt(path, write, 0), DiskShortage):
            SHORTAGES.begin(done)
            time.sleep(RETRY_S)
    finally:
        SHORTAGES.end(path)
    return done[0]


class DeferredFile:
    """A small file whose newest content is written now, or as soon as it can be: its writer never waits, and nothing
    that is wrong with disk, folder or file descriptors keeps it from its work, or from ending in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: bytes | None = None
        self._said = ""

    def write(self, content: bytes) -> None:
        """Replace the file's content, as soon as can be."""
        self._content = content
        self.retry()

    @property
    def is_late(self) -> bool:
        """Whether the file does not have its newest content yet."""
        return self._content is not None

    def retry(self) -> None:
        """Write what could not be written before, if there is anything."""
        content = self._content
        if content is None or not self._path.parent.is_dir():
            return
        try:
            done = _attempt(self._path, lambda: self._replace(content), len(content))
        except OSError as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("%s cannot be written, and is tried again: %s", self._path, error)
            return
        if isinstance(done, DiskShortage):
            SHORTAGES.begin(done)
            return
        self._content, self._said = None, ""
        SHORTAGES.end(self._path)

    def _replace(self, content: bytes) -> None:
        """Replace the file, as `replace_file` does, but unsynced: the writer must not wait for a slow disk."""
        partial = partial_of(self._path)
        try:
            partial.write_bytes(content)
            partial.replace(self._path)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


async def retry_until_room(*files: DeferredFile) -> None:
    """Write what is late of `files` when there is room for it. Runs until cancelled."""
    while True:
        await sleep_until_tick(RETRY_S)
        for file in files:
            file.retry()
