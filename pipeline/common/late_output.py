"""Makes standard output and error survive a full disk.

Text that cannot be written is kept, and written when there is room.

Guarantees that a log line never ends a process, also not when the reader of the output is gone (`| head`); that memory
for what waits is bounded in bytes; and that lines which had to be dropped are counted in the log itself.
"""

import errno
import io
import os
import sys
import threading
from collections import deque

from lachesis.pipeline.common.disk import is_disk_full
from lachesis.pipeline.common.safe_text import SafeOutput
from lachesis.pipeline.common.ticks import sleep_until_tick

__all__ = ["BufferedOutput", "flush_output", "keep_output"]

MAX_KEPT_BYTES = 256 << 10


class BufferedOutput(io.RawIOBase):
    """Writes to a file descriptor, which stays open when this is closed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_terminal = os.isatty(descriptor)
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._dropped = 0
        self._lock = threading.RLock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int:
        """Write, or keep what there is no room for.

        Raises `OSError` unless the disk is full or the reader gone.
        """
        content = bytes(data)  # type: ignore[call-overload]
        with self._lock:
            self._kept.append(content)
            self._kept_bytes += len(content)
            self._write_kept()
            self._drop_excess()
        return len(content)

    def flush(self) -> None:
        """Write what was kept, as far as there is room."""
        if not self.closed and (self._kept or self._dropped):
            with self._lock:
                self._write_kept()

    def forget(self) -> None:
        """Drop what is kept, which another process writes: this one was forked from it."""
        self._kept.clear()
        self._kept_bytes = self._dropped = 0

    def _drop_excess(self) -> None:
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft())
            self._dropped += 1

    def _write_kept(self) -> None:
        """Write as much as there is room for; what is left of the first line stays first."""
        if self._dropped:
            notice = f"({self._dropped} lines were lost here, while the disk was full)\n".encode()
            if self._write_some(notice) < len(notice):
                return
            self._dropped = 0
        while self._kept:
            line = self._kept.popleft()
            written = self._write_some(line)
            self._kept_bytes -= written
            if written < len(line):
                self._kept.appendleft(line[written:])
                return

    def _write_some(self, content: bytes) -> int:
        """Return how many bytes there was room for."""
        written = 0
        try:
            while written < len(content):
                written += os.write(self._descriptor, content[written:])
        except OSError as error:
            if error.errno == errno.EPIPE or (error.errno == errno.EIO and self._is_terminal):  # the reader is gone
                return len(content)
            if not is_disk_full(error):
                raise
        return written


def keep_output() -> None:
    """Let this process's standard output and error survive a full disk. Call it before logging is set up."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            continue
        if isinstance(before := getattr(stream, "buffer", None), BufferedOutput):
            before.forget()
        try:
            stream.flush()
            descriptor = stream.fileno()
        except (OSError, ValueError):  # replaced by what is no file, as test runners do
            continue
        kept = BufferedOutput(descriptor)
        text = io.TextIOWrapper(kept, stream.encoding, "backslashreplace", write_through=True)  # type: ignore[type-var]
        setattr(sys, name, SafeOutput(text))


async def flush_output() -> None:
    """Write once a second what was kept and has room now. Runs until cancelled."""
    while True:
        await sleep_until_tick(1.0)
        sys.stdout.flush()
        sys.stderr.flush()
