"""Large messages: chunks first, then a head on the real subject that lists them and vouches for their content.

A consumer that filters the real subjects sees heads alone, so that one message stays one message. The head is written
last: a producer that dies half-way leaves chunks that nothing refers to, never a message that cannot be read.
"""

import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import anyio
import msgspec

from lachesis.pipeline.bus.api import PubAck, Stored
from lachesis.pipeline.bus.routing import BROKEN_HEADER, LARGE_HEADER, MSG_ID_HEADER
from lachesis.schemas.errors import DataError, NotFoundError
from lachesis.schemas.subjects import blob

__all__ = ["CHUNK_BYTES", "INLINE_BYTES", "MAX_LARGE_BYTES", "Blobs", "claimed_size"]

INLINE_BYTES = 4 << 20
"""Largest data that is stored as one message."""
CHUNK_BYTES = 512 << 10
MAX_LARGE_BYTES = 256 << 20
"""Largest data at all; a reader holds it in memory as a whole."""

Store = Callable[[str, bytes, Mapping[str, str]], Awaitable[PubAck]]
Fetch = Callable[[str, Sequence[int]], AsyncIterator[Stored]]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The data of a large message's head: the chunks' sequences in order, the whole's length and SHA-256."""

    chunks: list[int]
    size: int
    sha256: bytes


def claimed_size(head: bytes) -> int:
    """Return the bytes of the large message with this head; 0 where no message with that head could be read."""
    try:
        size = msgspec.msgpack.decode(head, type=Head).size
    except msgspec.MsgspecError:
        return 0
    return size if 0 <= size <= MAX_LARGE_BYTES else 0


class Blobs:
    """Splits and joins over the given ways to store and to fetch messages."""

    def __init__(self, store: Store, fetch: Fetch) -> None:
        self._store = store
        self._fetch = fetch

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        """Store `data` as chunks and a head; returns the head's acknowledgement. Raises `DataError` when too large."""
        if len(data) > MAX_LARGE_BYTES:
            raise DataError(f"{subject}: {len(data)} bytes where a large message may have {MAX_LARGE_BYTES}")
        # A name of its own for each attempt: a retry must not be answered with chunks that were deleted meanwhile.
        name = secrets.token_hex(16)
        offsets = range(0, len(data), CHUNK_BYTES)
        chunks = [0] * len(offsets)

        async def put(index: int) -> None:
            part = data[offsets[index] : offsets[index] + CHUNK_BYTES]
            chunks[index] = (await self._store(blob(name), part, {MSG_ID_HEADER: f"{name}/{index}"})).seq

        for first in range(0, len(offsets), 16):  # in rounds, so that the chunks lie together and memory is bounded
            await _all(put, range(first, min(first + 16, len(offsets))))
        head = Head(chunks, len(data), hashlib.sha256(data).digest())
        return await self._store(subject, msgspec.msgpack.encode(head), {**headers, LARGE_HEADER: blob(name)})

    async def join(self, message: Stored) -> Stored:
        """Return a message with its whole data. Raises `DataError` when a chunk is gone or the content is not whole."""
        subject = message.headers.get(LARGE_HEADER)
        if subject is None:
            return message
        place = f"large message {message.seq} of {message.stream}"
        try:
            head = msgspec.msgpack.decode(message.data, type=Head)
        except msgspec.MsgspecError as error:
            raise DataError(f"{place}: its head is unreadable: {error}") from error
        if not 0 <= head.size <= MAX_LARGE_BYTES or len(head.chunks) > MAX_LARGE_BYTES // CHUNK_BYTES:
            raise DataError(f"{place}: its head claims {head.size} bytes in {len(head.chunks)} chunks")
        parts = []
        try:
            async for chunk in self._fetch(message.stream, head.chunks):
                if chunk.subject != subject:
                    raise DataError(f"{place}: sequence {chunk.seq} is no chunk of it")
                parts.append(chunk.data)
        except NotFoundError as error:
            raise DataError(f"{place}: a chunk is gone: {error}") from error
        data = b"".join(parts)
        if len(data) != head.size or hashlib.sha256(data).digest() != head.sha256:
            raise DataError(f"{place}: {len(data)} bytes that are not the {head.size} that were stored")
        return replace(message, data=data, headers={k: v for k, v in message.headers.items() if k != LARGE_HEADER})

    async def join_or_mark(self, message: Stored) -> Stored:
        """As `join`; a message that cannot be put together comes with the reason in a header, to be dead-lettered."""
        try:
            return await self.join(message)
        except DataError as error:
            return replace(message, headers={**message.headers, BROKEN_HEADER: str(error)})


async def _all(action: Callable[[int], Awaitable[None]], items: Sequence[int]) -> None:
    """Run `action` for all items at once; the first error is raised as itself."""
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:

        async def run(item: int) -> None:
            nonlocal error
            try:
                await action(item)
            except Exception as failed:  # noqa: BLE001  # raised below, bare
                error = error or failed
                tasks.cancel_scope.cancel()

        for item in items:
            tasks.start_soon(run, item)
    if error is not None:
        raise error
