"""Splits large messages into chunks and a head, which lists the chunks and verifies their content.

A consumer that filters the real subjects sees heads alone, so that one message stays one message. The head is written
last: a producer that dies half-way leaves chunks that nothing refers to, never a message that cannot be read.

Each chunk is stored only behind the one before, and the head only behind the last of them. So a task that writes behind
the chunks of a producer that seems dead (`trimming.delete_orphan_chunks`) knows that their head can never come any
more; a producer that was slow, not dead, is refused and sends all of them again.
"""

import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lachesis.pipeline.bus.api import PubAck, StoredMessage
from lachesis.pipeline.bus.publisher import EXPECTED_HEADER, Publisher
from lachesis.pipeline.bus.routing import (
    BROKEN_HEADER,
    LARGE_HEADER,
    MSG_ID_HEADER,
    chunks_subject,
    names_chunks,
    stored_in,
)
from lachesis.pipeline.errors import FencedError, InfrastructureError, NotFoundError
from lachesis.schemas.codec import UNREADABLE
from lachesis.schemas.errors import DataError

__all__ = ["CHUNK_BYTES", "INLINE_BYTES", "MAX_LARGE_BYTES", "BlobStore", "Fetch", "claimed_size"]

INLINE_BYTES = 4 << 20
"""Largest data that is stored as one message."""
CHUNK_BYTES = 512 << 10
MAX_LARGE_BYTES = 256 << 20
"""Largest data at all; a reader holds it in memory as a whole."""

_EXPECTED_SUBJECT_HEADER = "Nats-Expected-Last-Subject-Sequence-Subject"
_ATTEMPTS = 5

Fetch = Callable[[str, Sequence[int]], AsyncIterator[StoredMessage]]


class BlobHead(msgspec.Struct, frozen=True, array_like=True):
    """The data of a large message's head: the chunks' sequences in order, the whole's length and SHA-256."""

    chunks: list[int]
    size: int
    sha256: bytes


def claimed_size(head: bytes) -> int:
    """Return the bytes of the large message with this head.

    0 where no message with that head could be read.
    """
    try:
        size = msgspec.msgpack.decode(head, type=BlobHead).size
    except UNREADABLE:
        return 0
    return size if 0 <= size <= MAX_LARGE_BYTES else 0


class BlobStore:
    """Splits and joins, over a publisher and a way to fetch messages by sequence."""

    def __init__(self, publisher: Publisher, fetch: Fetch) -> None:
        self._publisher = publisher
        self._fetch = fetch

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        """Store `data` as chunks and a head; returns the head's acknowledgement.

        Raises `DataError` when too large.

        Chunks that were swept away meanwhile are sent again; `InfrastructureError` when that happens time and again.
        """
        if len(data) > MAX_LARGE_BYTES:
            raise DataError(f"{subject}: {len(data)} bytes where a large message may have {MAX_LARGE_BYTES}")
        for _ in range(_ATTEMPTS):
            # A name of its own for each attempt: a retry must not be answered with chunks that were deleted meanwhile.
            chunks = chunks_subject(subject, secrets.token_hex(16))
            try:
                return await self._store(subject, data, headers, chunks)
            except FencedError:
                continue
        raise InfrastructureError(
            f"{subject}: its chunks were deleted {_ATTEMPTS} times before its head could be stored; storing "
            f"{len(data)} bytes takes longer than flow.retention.orphans_after_s, so raise that"
        )

    async def _store(self, subject: str, data: bytes, headers: Mapping[str, str], chunks: str) -> PubAck:
        """Store under a name. Raises `FencedError` when somebody else has written to it."""
        seqs = [0]
        for index, offset in enumerate(range(0, len(data), CHUNK_BYTES)):
            part = data[offset : offset + CHUNK_BYTES]
            msg_id = {MSG_ID_HEADER: f"{chunks}/{index}"}
            seqs.append(await self._publisher.append(stored_in(chunks), chunks, part, after=seqs[-1], headers=msg_id))
        head = BlobHead(seqs[1:], len(data), hashlib.sha256(data).digest())
        fence = {EXPECTED_HEADER: str(seqs[-1]), _EXPECTED_SUBJECT_HEADER: chunks}
        return await self._publisher.store(
            subject, msgspec.msgpack.encode(head), {**headers, **fence, LARGE_HEADER: chunks}
        )

    async def join(self, message: StoredMessage) -> StoredMessage:
        """Return a message with its whole data.

        Raises `DataError` when a chunk is gone or the content is not whole.
        """
        subject = message.headers.get(LARGE_HEADER)
        if subject is None:
            return message
        place = f"large message {message.seq} of {message.stream}"
        head = _checked_head(message, place)
        parts: list[bytes] = []
        left = head.size
        try:
            async for chunk in self._fetch(stored_in(message.subject), head.chunks):
                left -= len(chunk.data)
                if chunk.subject != subject or left < 0:
                    raise DataError(f"{place}: sequence {chunk.seq} is no chunk of it")
                parts.append(chunk.data)
        except NotFoundError as error:
            raise DataError(f"{place}: a chunk is gone: {error}") from error
        data = b"".join(parts)
        if len(data) != head.size or hashlib.sha256(data).digest() != head.sha256:
            raise DataError(f"{place}: {len(data)} bytes that are not the {head.size} that were stored")
        return replace(message, data=data, headers={k: v for k, v in message.headers.items() if k != LARGE_HEADER})

    async def join_or_mark(self, message: StoredMessage) -> StoredMessage:
        """Like `join`, but mark a message that cannot be assembled, for the dead letters.

        The reason is in a header.
        """
        try:
            return await self.join(message)
        except DataError as error:
            return replace(message, headers={**message.headers, BROKEN_HEADER: str(error)})


def _checked_head(message: StoredMessage, place: str) -> BlobHead:
    """Return the head that `message` holds. Raises `DataError` on one that no writer of ours would write.

    Its chunks lie before it, each once: so what it makes a reader fetch was stored, and is paid for, in full.
    """
    try:
        head = msgspec.msgpack.decode(message.data, type=BlobHead)
    except UNREADABLE as error:
        raise DataError(f"{place}: its head is unreadable: {str(error)[:200]}") from error
    if not 0 <= head.size <= MAX_LARGE_BYTES or len(head.chunks) != -(-head.size // CHUNK_BYTES):
        raise DataError(f"{place}: its head claims {head.size} bytes in {len(head.chunks)} chunks")
    ascending = all(before < after for before, after in itertools.pairwise([0, *head.chunks, message.seq]))
    if not ascending or not names_chunks(message.subject, message.headers[LARGE_HEADER]):
        raise DataError(f"{place}: what its head lists are no chunks of it")
    return head
