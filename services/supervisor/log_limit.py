"""Keeps the logs of a run's processes bounded in bytes, also those that a service's children write.

Guarantees that a log which grew beyond its limit keeps its newest lines in a file beside it, and that a full disk keeps
no log from being cut. Writers go on undisturbed: they append.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread

from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.schemas.notices import Notice

__all__ = ["OLD_SUFFIX", "LogLimit", "cut_log", "read_tail"]

log = logging.getLogger("lachesis")

OLD_SUFFIX = ".old"
"""What the newest lines of a log that was cut are kept under, beside it."""
_KEPT_SHARE = 4
"""A cut log keeps one part in so many."""
_LOOK_S = 0.5
_SAID_S = 60.0
"""Seconds for which a log that was cut is reported."""
_MAX_TAIL_BYTES = 1 << 20


def cut_log(file: Path, limit_bytes: int) -> int:
    """Empty a log that has more than `limit_bytes`, but for its newest lines.

    Returns how many bytes it had; 0: it was not cut.
    """
    try:
        if file.stat().st_size <= limit_bytes:
            return 0
        with file.open("r+b") as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(size - limit_bytes // _KEPT_SHARE)
            newest = opened.read(limit_bytes // _KEPT_SHARE)
            half_line, _, whole_lines = newest.partition(b"\n")
            if len(half_line) < len(whole_lines):
                newest = whole_lines
            old = file.with_name(file.name + OLD_SUFFIX)
            partial = old.with_name(old.name + ".partial")
            try:
                partial.write_bytes(newest)
                partial.replace(old)
            except OSError:  # a full disk: the lines are lost, and room is made
                with suppress(OSError):
                    partial.unlink(missing_ok=True)
            opened.truncate(0)
    except OSError:
        return 0  # it is gone, or there is none yet
    said = f"{time.strftime('%Y-%m-%d %H:%M:%S')} this log had {size} bytes and was cut: services.log_bytes is "
    with suppress(OSError), file.open("ab") as opened:
        opened.write(f"{said}{limit_bytes}; its newest lines until then are in {old.name}\n".encode())
    return size


def read_tail(file: Path, start: int, count: int) -> str:
    """Return the last lines of what was written to `file` after its first `start` bytes.

    Of a log that was cut since, all lines count.
    """
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(start if start <= size else 0, size - _MAX_TAIL_BYTES))
        return "\n".join(opened.read(_MAX_TAIL_BYTES).decode(errors="replace").splitlines()[-count:])


class LogLimit:
    """Cuts logs that grow beyond `limit_bytes`. `files` says which there are, with the process that each is of."""

    def __init__(self, limit_bytes: int, files: Callable[[], Iterable[tuple[str, Path]]]) -> None:
        self._limit_bytes = limit_bytes
        self._files = files
        self._cut_s: dict[str, float] = {}  # by process: when its log was cut last

    async def watch(self, report: Callable[[list[Notice]], None]) -> None:
        """Look at the logs again and again, and `report` those that are cut. Runs until cancelled."""
        while True:
            for name in await anyio.to_thread.run_sync(self._cut_all):
                self._record(name, time.monotonic())
            report(self.notices(time.monotonic()))
            await sleep_until_tick(_LOOK_S)

    def _cut_all(self) -> list[str]:
        """Cut what is too long, and return the names of the processes whose logs that were."""
        with suppress(OSError):  # no file descriptor is left to look into a folder
            return [name for name, file in self._files() if cut_log(file, self._limit_bytes)]
        return []

    def _record(self, name: str, now_s: float) -> None:
        self._cut_s[name] = now_s

    def notices(self, now_s: float) -> list[Notice]:
        """Return a notice of each process whose log was cut lately."""
        self._cut_s = {name: cut_s for name, cut_s in self._cut_s.items() if now_s - cut_s <= _SAID_S}
        return [
            Notice(
                key=f"log/{name}",
                source=name,
                what=f"{name} writes so much that its log is cut",
                why=f"it had more than services.log_bytes = {self._limit_bytes} bytes; the newest lines are kept",
                mend="see what it prints: what its code prints, and what the servers say that it starts, is in it",
            )
            for name in self._cut_s
        ]
