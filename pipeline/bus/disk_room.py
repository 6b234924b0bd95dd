"""Computes the disk space left for the streams of an embedded server, and the warning to give.

Pure but for `stored_bytes` and `StoreLogReader`, which read the store. After a failed write to a stream, nats-server
2.15 answers no publish to it until it is restarted, also when there is room again; only its log says so.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from lachesis.pipeline.common.disk import DiskRoom

__all__ = [
    "KEEP_FREE_BYTES",
    "RESTART_BYTES",
    "StoreFinding",
    "StoreLogReader",
    "assess",
    "failed_streams",
    "stored_bytes",
]

RESTART_BYTES = 32 << 20
"""Room from which on a server whose streams failed is started again: a few messages of the largest size."""
KEEP_FREE_BYTES = 2 * RESTART_BYTES
"""Room that is kept for what must be stored whatever happens: outcomes, checkpoints, logs. No group is admitted into
it."""
WARN_SHARE = 0.1
"""Share of what the streams may still store that must be free, or it is warned of."""
_FAILURES = re.compile(
    r"Filestore \[(?P<store>[^\]]+)\] Critical write error"
    r"|failed to store a msg on stream '[^']*> (?P<publish>[^']+)'"
    r"|JetStream stream '[^']*> (?P<stream>[^']+)' critical write error"
)
_READ_BYTES = 1 << 20


class StoreFinding(NamedTuple):
    """low: the streams may come to fill the disk. closed: no group is admitted any more. full: there is hardly room for
    what is under way. failed: a write failed, so the streams named take no messages until the server is restarted."""

    level: Literal["ok", "low", "closed", "full", "failed"]
    text: str | None = None

    @property
    def stops(self) -> bool:
        """Whether the run stands still by it."""
        return self.level not in {"ok", "low"}


def failed_streams(lines: Iterable[str]) -> set[str]:
    """Return the streams that a write to failed, by the lines of a server's log."""
    found = (_FAILURES.search(line) for line in lines)
    return {next(filter(None, match.groups())) for match in found if match is not None}


def assess(store: Path, room: DiskRoom, stored: int, budget: int, failed: Iterable[str] = ()) -> StoreFinding:
    """Say how the disk of `store` stands, where `stored` of `budget` bytes are taken.

    All figures are bytes.
    """
    names = ", ".join(sorted(failed))
    cause = f"a write failed, and no message is taken any more by {names}"
    free, grow = room.free_bytes, max(0, budget - stored)
    disk, lack = f"the disk that holds {store}", f"{free:,} bytes free, at least {KEEP_FREE_BYTES - free:,} more needed"
    mend = "make room there, and the run goes on by itself"
    if names:
        fits = free >= RESTART_BYTES or not room.total_bytes
        return StoreFinding("failed", cause if fits else f"{disk} is full ({lack}; {mend}): {cause}")
    if not room.total_bytes or not grow:
        return _OK
    if free < RESTART_BYTES:
        return StoreFinding("full", f"{disk} is full ({lack}; {mend})")
    if free < KEEP_FREE_BYTES:
        return StoreFinding("closed", f"{disk} is nearly full, so no group is admitted ({lack}; {mend})")
    if free < min(grow, max(2 * KEEP_FREE_BYTES, int(WARN_SHARE * grow))):
        text = f"{disk} may become full: {free:,} bytes free, while the streams may grow by {grow:,}"
        return StoreFinding("low", f"{text}; make room there, or lower streams.*_bytes")
    return _OK


_OK = StoreFinding("ok")


def stored_bytes(store: Path) -> int:
    """Return what the files of a store take, bytes, as far as it can be read."""
    count = 0
    with suppress(OSError):  # a folder is gone, or no file descriptor is left to look into it
        for path in store.rglob("*"):
            count += _size(path)
    return count


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0  # gone since it was listed, as a server's files go


class StoreLogReader:
    """The log of one life of a server, read on from where it was read to last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self.failed: set[str] = set()
        """The streams that a write to has failed so far."""

    def read_on(self) -> None:
        """Take in what was written since."""
        try:
            if self._path.stat().st_size == self._read:
                return
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._read:
                    self._read = 0  # it was cut
                file.seek(self._read)
                text = file.read(_READ_BYTES)
        except OSError:
            return  # there is none yet
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole) or (len(text) if len(text) == _READ_BYTES else 0)
        self.failed |= failed_streams(whole.decode(errors="replace").splitlines())
