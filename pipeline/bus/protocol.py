"""Cuts what a NATS server sends into messages and other lines, and reads headers. Pure.

https://docs.nats.io/reference/reference-protocols/nats-protocol describes the protocol.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["MAX_LINE_BYTES", "Frame", "FrameError", "FrameReader", "parse_headers"]

MAX_LINE_BYTES = 1 << 20
"""Longest line that is not a message; a server that knows many others lists them all in one."""
# The server splits a line at blanks and tabs. A subject may hold other white space, such as form feeds.
_MSG = re.compile(rb"MSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(?:([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
_HMSG = re.compile(rb"HMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(?:([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n")
_END = b"\r\n"
_VERSION = b"NATS/1.0"


class FrameError(Exception):
    """What a server sends does not follow the protocol."""


class Frame(NamedTuple):
    """A message, or with `sid` 0 another line of the protocol, which `data` holds without its end.

    `header`: the header block with its first line; None: there is none.
    """

    sid: int
    subject: bytes
    reply: bytes
    header: bytes | None
    data: bytes


class FrameReader:
    """Keeps the beginning of a frame until the rest arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._needed = 0
        """How many bytes the first frame takes, if that is known."""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are whole with `data`.

        The caller may stop early: then the next call yields the others. Raises `FrameError` for what is no frame.
        """
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            buffer, self._rest = self._rest, bytearray()
        at = self._needed = 0
        try:
            while at < len(buffer):
                frame, end = self._frame_at(buffer, at)
                if frame is None:
                    break
                at = end
                yield frame
        finally:
            if at < len(buffer):
                self._rest = bytearray(memoryview(buffer)[at:])

    def _frame_at(self, buffer: bytes | bytearray, at: int) -> tuple[Frame | None, int]:
        """Return the frame that begins at `at` and where it ends, or None: it is not whole."""
        found = (_HMSG if buffer[at] == ord("H") else _MSG).match(buffer, at)
        if found is None:
            return self._line_at(buffer, at)
        subject, sid, reply, *sizes = found.groups()
        start = found.end()
        body = start if len(sizes) == 1 else start + int(sizes[0])
        end = start + int(sizes[-1])
        if end + len(_END) > len(buffer):
            self._needed = end + len(_END) - at
            return None, at
        if body > end or buffer[end : end + len(_END)] != _END:
            raise FrameError("a message that does not end where it says")
        header = None if body == start else bytes(buffer[start:body])
        return Frame(int(sid), subject, reply or b"", header, bytes(buffer[body:end])), end + len(_END)

    def _line_at(self, buffer: bytes | bytearray, at: int) -> tuple[Frame | None, int]:
        end = buffer.find(_END, at)
        if end < 0:
            if len(buffer) - at > MAX_LINE_BYTES:
                raise FrameError(f"a line longer than {MAX_LINE_BYTES} bytes")
            return None, at
        return Frame(0, b"", b"", None, bytes(buffer[at:end])), end + len(_END)


def parse_headers(block: bytes) -> dict[str, str] | None:
    r"""Return the headers of a message: of several of one name the last; None if there are none.

    A server's own status becomes `Status`, and its text `Description`. What is no header is left out: other clients may
    store anything there.
    """
    first, *lines = block.split(_END)
    if not first.startswith(_VERSION):
        return None
    headers: dict[str, str] = {}
    status = first[len(_VERSION) :].strip()
    if status:
        if status[:3].isdigit():
            headers["Status"] = status[:3].decode()
        if text := status[3:].strip():
            headers["Description"] = text.decode("utf-8", "replace")
    for line in lines:
        before, colon, value = line.partition(b":")
        words = before.split()
        if colon and len(words) == 1 and words[0].isascii():
            headers[words[0].decode()] = value.strip().decode("utf-8", "replace")
    return headers or None
