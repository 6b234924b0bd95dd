"""Receives and unpacks request bodies, within bounds of time and of unpacked bytes.

Guarantees: all bodies that are arriving or wait for conversion together take no more than the budget's bytes; and a
client that sends its body slowly, or not at all, delays no other client, and itself no longer than the allowed time.
"""

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from starlette.requests import Request

from lachesis.pipeline.errors import InfrastructureError
from lachesis.schemas.errors import DataError

__all__ = ["BodyBudget", "BrokenGzipError", "NoRoomError", "SlowBodyError", "unpacked", "unzipped"]

_UNHURRIED_S = 5.0
"""A body may take this long even if others want its room."""


class BrokenGzipError(DataError):
    """Raised when a body that claims to be gzip is not."""


class SlowBodyError(DataError):
    """Raised when a body does not arrive in time."""


class NoRoomError(InfrastructureError):
    """Raised when a body was not received in time because others took all the room: send it again later."""


class _BodyRead:
    """A body on its way. `scope` is cancelled to give it up, `waits` while it waits for room."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.scope = anyio.CancelScope()
        self.began_s = anyio.current_time()
        self.waits = False


class BodyBudget:
    """Receives bodies of `limit_bytes` bytes in all, each within `within_s` seconds.

    If there is no room, the body that has been arriving for the longest is given up for the others, once it took longer
    than a few seconds.
    """

    def __init__(self, limit_bytes: int, within_s: float) -> None:
        self._limit_bytes = limit_bytes
        self._within_s = within_s
        self._arriving: list[_BodyRead] = []
        """In the order in which they began."""
        self._changed = anyio.Event()
        self.used_bytes = 0

    @asynccontextmanager
    async def receive(self, request: Request, most_bytes: int) -> AsyncIterator[bytes]:
        """Yield the body as it was sent; its room is kept until the context ends.

        Raises DataError when it has more than `most_bytes` bytes, SlowBodyError, and NoRoomError.
        """
        body = _BodyRead()
        self._arriving.append(body)
        try:
            try:
                await self._receive(body, request, most_bytes)
            finally:
                self._arriving.remove(body)
            yield bytes(body.data)
        finally:
            self.used_bytes -= len(body.data)
            self._changed.set()

    async def _receive(self, body: _BodyRead, request: Request, most_bytes: int) -> None:
        body.scope.deadline = body.began_s + self._within_s
        with body.scope:
            async for part in request.stream():
                if len(body.data) + len(part) > most_bytes:
                    raise _too_large(most_bytes)
                await self._make_room(body, len(part))
                body.data += part
                self.used_bytes += len(part)
            return
        if body.waits:
            raise NoRoomError(
                "the gateway has no room for this body yet (gateway.receiving_bytes): send it again later"
            )
        took_s = anyio.current_time() - body.began_s
        raise SlowBodyError(
            f"the body had not arrived after {took_s:.0f} s (at most {self._within_s:g}: gateway.body_s; less where "
            "other clients wait for room)"
        )

    async def _make_room(self, body: _BodyRead, size: int) -> None:
        body.waits = True
        while self.used_bytes + size > self._limit_bytes and self.used_bytes > len(body.data):
            self._changed = self._changed if not self._changed.is_set() else anyio.Event()
            oldest = next((other for other in self._arriving if other is not body and other.data), None)
            if oldest is None:
                await self._changed.wait()
                continue
            with anyio.move_on_at(oldest.began_s + _UNHURRIED_S):
                await self._changed.wait()
                continue
            oldest.scope.cancel()
            await self._changed.wait()
        body.waits = False


def unpacked(request: Request, data: bytes, most_bytes: int) -> bytes:
    """Return the uncompressed body of `request`, which came as `data`.

    Raises DataError when that has more than `most_bytes` bytes, and BrokenGzipError.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "gzip" and data:
        found = unzipped(data, most_bytes)
        request.state.plain_bytes = len(found)
        return found
    if encoding not in {"gzip", "identity"}:
        raise DataError(f"content-encoding {encoding[:40]!r} is not known here; send gzip or none")
    return data


def unzipped(data: bytes, limit: int) -> bytes:
    """Return the content of gzip `data`.

    Raises `BrokenGzipError`, and `DataError` if it is more than `limit` bytes.
    """
    inflate = zlib.decompressobj(wbits=31)
    try:
        found = inflate.decompress(data, limit + 1)
    except zlib.error as error:
        raise BrokenGzipError(f"Invalid gzip payload: {error}") from error
    if len(found) > limit:
        raise _too_large(limit)
    if not inflate.eof or inflate.unused_data:
        raise BrokenGzipError("Invalid gzip payload: it ends too early, or too late")
    return found


def _too_large(limit: int) -> DataError:
    return DataError(
        f"the body has more than {limit} bytes unpacked, the setting gateway.body_bytes; send smaller groups"
    )
