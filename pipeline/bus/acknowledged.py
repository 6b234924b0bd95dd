"""Remembers, beyond a process's end, its newest acknowledged message of each stream.

If a store loses its newest messages and no process had read them, only their writer knows that they existed. Guarantees
that it is an error at once if a new message takes a sequence that was acknowledged for another one. With a file,
acknowledgements survive `kill -9` of the writer, so that `runtime.store_marks` can compare them. A power cut may take
the newest entries of the file, as it takes what the server had not written to its disk yet.
"""

import fcntl
import hashlib
import logging
import os
import re
import struct
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from lachesis.pipeline.bus.api import PubAck
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import HistoryLostError

__all__ = ["ACKNOWLEDGED", "AcknowledgedEnds", "Acknowledgement", "digest_of", "read_acknowledged"]

log = logging.getLogger("lachesis")

ACKNOWLEDGED: Final = "acknowledged"
"""Folder, in a run's, with a file for each process that stores something."""
_MAGIC: Final = b"lachesis-acks-1\n"
_SLOT: Final = struct.Struct("<8sQQ16s")
_SLOT_BYTES: Final = _SLOT.size + 4
_CONNECTIONS: Final = 4
"""Connections of which each stream's newest message stays in the file: one that was lost may be compared later."""
_MAX_STREAMS: Final = 16
_MAX_FILES: Final = 4096
_NAME: Final = re.compile(r"[^A-Za-z0-9_-]+")


class Acknowledgement(NamedTuple):
    """A message that a server acknowledged: its stream's kind, its sequence, the digest of its id, when (Unix ns)."""

    stream: str
    seq: int
    digest: bytes
    acked_ns: int


class AcknowledgedEnds:
    """The newest acknowledged message of each stream, over one connection and those before it."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._file: _AckFile | None = None

    @property
    def newest(self) -> Mapping[str, int]:
        """By kind of stream the highest sequence that was acknowledged."""
        return self._newest

    def keep_in(self, folder: Path, name: str) -> None:
        """Keep it in `folder`, which is a run's, as well; a file is made with the first acknowledgement."""
        self._file = _AckFile(folder, name)

    def close(self) -> None:
        """Let another process go on with the file."""
        if self._file is not None:
            self._file.close()

    def mark_reconnected(self) -> None:
        """Say that another connection begins, perhaps to a server that has lost what this one acknowledged."""
        if self._file is not None:
            self._file.mark_reconnected()

    def forget(self, stream: str) -> None:
        """Say that a stream is deleted with all that it held."""
        self._newest.pop(stream, None)
        if self._file is not None:
            self._file.forget(stream)

    def record(self, ack: PubAck, msg_id: str, *, after: int) -> None:
        """Remember an acknowledgement.

        `after`: what `newest` held of the stream when the message was first sent.

        Raises `HistoryLostError` if the stream went back since: what it stores later has higher sequences.
        """
        if not ack.duplicate and ack.seq <= after:
            raise HistoryLostError(
                f"stream {ack.stream} stored a new message at sequence {ack.seq}, after it had acknowledged messages "
                f"up to sequence {after} to this process: at least {after - ack.seq + 1} of them are gone. The broker "
                "lost history that it had acknowledged, or its store was replaced by an older copy"
            )
        if ack.seq > self._newest.get(ack.stream, 0):
            self._newest[ack.stream] = ack.seq
            if self._file is not None:
                self._file.write(Acknowledgement(ack.stream, ack.seq, digest_of(msg_id), time.time_ns()))


def digest_of(msg_id: str) -> bytes:
    """Return what a file keeps of a message's id."""
    return hashlib.blake2b(msg_id.encode(errors="surrogatepass"), digest_size=16).digest()


def read_acknowledged(folder: Path) -> list[tuple[str, list[Acknowledgement]]]:
    """Return what the files in a run's folder hold, each with the name of its writer.

    Entries that are broken are passed over.
    """
    found = []
    with suppress(OSError):  # there is none
        for file in sorted((folder / ACKNOWLEDGED).iterdir())[:_MAX_FILES]:
            try:
                data = read_small_file(file)
            except OSError as error:
                log.warning("%s: %s", file, error.strerror)
                continue
            if acks := _unpack(data):
                found.append((file.name.rpartition(".")[0] or file.name, acks))
    return found


def _unpack(data: bytes) -> list[Acknowledgement]:
    if not data.startswith(_MAGIC):
        return []
    found = []
    last = min(len(data), len(_MAGIC) + _MAX_STREAMS * _CONNECTIONS * _SLOT_BYTES)
    for start in range(len(_MAGIC), last - _SLOT_BYTES + 1, _SLOT_BYTES):
        packed = data[start : start + _SLOT.size]
        if int.from_bytes(data[start + _SLOT.size : start + _SLOT_BYTES], "little") == zlib.crc32(packed):
            kind, seq, acked_ns, digest = _SLOT.unpack(packed)
            if seq:
                found.append(Acknowledgement(kind.rstrip(b"\0").decode("ascii", "replace"), seq, digest, acked_ns))
    return found


class _AckFile:
    """A file of slots: for each stream one for each of the newest connections. Each is written by one call, so that
    one that was cut off is whole, or its check sum shows it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = _NAME.sub("-", name)[:80]
        self._descriptor = -1
        self._closed = False
        self._rows: dict[str, int] = {}  # by stream its place in the file
        self._at: dict[str, int] = {}  # by stream the slot of this connection
        self._used: set[str] = set()  # the streams that this connection has written
        self._said = False

    def close(self) -> None:
        self._closed = True
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def mark_reconnected(self) -> None:
        for stream in self._used:
            self._at[stream] = (self._at[stream] + 1) % _CONNECTIONS
        self._used.clear()

    def forget(self, stream: str) -> None:
        if stream in self._rows and self._descriptor >= 0:
            for number in range(_CONNECTIONS):
                self._write(stream, number, b"")

    def write(self, ack: Acknowledgement) -> None:
        """Write an acknowledgement. A full disk is reported once; the memory still has it."""
        try:
            if self._closed or (self._descriptor < 0 and not self._open()):
                return
            if ack.stream not in self._rows:
                row = next((row for row in range(_MAX_STREAMS) if row not in self._rows.values()), None)
                if row is None:
                    return
                self._rows[ack.stream], self._at[ack.stream] = row, 0
            self._used.add(ack.stream)
            packed = _SLOT.pack(ack.stream.encode()[:8], ack.seq, ack.acked_ns, ack.digest)
            self._write(ack.stream, self._at[ack.stream], packed)
        except OSError as error:
            if not self._said:
                log.warning("%s: what is acknowledged to this process cannot be noted: %s", self._folder, error)
            self._said = True

    def _write(self, stream: str, number: int, packed: bytes) -> None:
        place = len(_MAGIC) + (self._rows[stream] * _CONNECTIONS + number) * _SLOT_BYTES
        data = packed + zlib.crc32(packed).to_bytes(4, "little") if packed else bytes(_SLOT_BYTES)
        os.pwrite(self._descriptor, data, place)

    def _open(self) -> bool:
        """Take the first file of the name that no other process has; go on behind what it holds."""
        if not self._folder.is_dir():
            return False
        folder = self._folder / ACKNOWLEDGED
        folder.mkdir(mode=0o700, exist_ok=True)
        for number in range(_MAX_FILES):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(folder / f"{self._name}.{number}", flags, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            except OSError:  # a file system without locks
                pass
            self._descriptor = descriptor
            self._take_up(os.pread(descriptor, 1 << 16, 0))
            return True
        return False

    def _take_up(self, data: bytes) -> None:
        """Keep what an earlier process wrote, and use the slot after its newest."""
        if not data.startswith(_MAGIC):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _MAGIC, 0)
            return
        for row in range(_MAX_STREAMS):
            start = len(_MAGIC) + row * _CONNECTIONS * _SLOT_BYTES
            slots = [
                _unpack(_MAGIC + data[start + at * _SLOT_BYTES : start + (at + 1) * _SLOT_BYTES])
                for at in range(_CONNECTIONS)
            ]
            known = [(one[0].acked_ns, at, one[0].stream) for at, one in enumerate(slots) if one]
            if known:  # else the stream was deleted, or none is behind
                _, at, stream = max(known)
                self._rows[stream], self._at[stream] = row, (at + 1) % _CONNECTIONS
