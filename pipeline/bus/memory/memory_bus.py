"""`MemoryBus`: the whole bus inside one process, for unit tests of stages and for `lachesis dev`.

The contract tests run the same cases against this and against a real server. Differences: nothing outlives the
process, and a large message is stored as one (so sequences have no gaps for its chunks).
"""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import anyio

from lachesis.pipeline.bus.api import (
    ConsumerLag,
    Delivery,
    Entry,
    PubAck,
    Reader,
    StoredMessage,
    StreamExtent,
    StreamUsage,
)
from lachesis.pipeline.bus.memory.stream import MemoryConsumer, MemoryStream, size_of
from lachesis.pipeline.bus.memory.unstored import UnstoredMessages
from lachesis.pipeline.bus.reply_subjects import RefusedReplies
from lachesis.pipeline.bus.routing import SIZE_HEADER, check_key, stream_of
from lachesis.pipeline.errors import BusClosedError, DamagedError, FencedError, HistoryLostError, NotFoundError
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.subjects import STREAMS

__all__ = ["MAX_MESSAGE_BYTES", "MemoryBus"]

MAX_MESSAGE_BYTES = 8 << 20
"""Most that one message may weigh, as the server is configured (`max_payload`)."""


@dataclass(frozen=True, slots=True)
class _MemoryLoan:
    """What one replica holds of a consumer, bytes by sequence, from hand-out to ack or nak."""

    held: dict[int, int] = field(default_factory=dict)

    def has_room(self, max_messages: int, max_bytes: int) -> bool:
        return len(self.held) < max_messages and (not self.held or sum(self.held.values()) < max_bytes)


class _MemoryDelivery:
    def __init__(
        self, bus: "MemoryBus", consumer: MemoryConsumer, message: StoredMessage, attempt: int, loan: _MemoryLoan
    ) -> None:
        self.message = message
        self.attempt = attempt
        self._bus = bus
        self._consumer = consumer
        self._loan = loan

    async def ack(self) -> None:
        self._consumer.ack(self.message.seq)
        self._release()

    async def nak(self, delay_s: float = 0.0) -> None:
        self._consumer.nak(self.message.seq, self._bus.now() + delay_s)
        self._release()

    async def in_progress(self) -> None:
        self._consumer.in_progress(self.message.seq, self._bus.now())

    def _release(self) -> None:
        self._loan.held.pop(self.message.seq, None)
        self._bus.wake()


class _MemoryDeliveries:
    """A class where a generator would do: cancelling a generator's `anext` ends it."""

    def __init__(self, bus: "MemoryBus", consumer: MemoryConsumer, max_messages: int, max_bytes: int) -> None:
        self._bus = bus
        self._consumer = consumer
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._loan = _MemoryLoan()

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        await anyio.lowlevel.checkpoint()
        while True:
            room = self._loan.has_room(self._max_messages, self._max_bytes)
            taken = self._consumer.lend(self._bus.now()) if room else None
            if taken is not None:
                message, attempt = taken
                self._loan.held[message.seq] = size_of(message)
                return _MemoryDelivery(self._bus, self._consumer, message, attempt, self._loan)
            await self._bus.changed(until=self._consumer.next_due() if room else None)


class _LastValue:
    def __init__(self, bus: "MemoryBus", entries: Mapping[str, Entry], key: str) -> None:
        self._bus = bus
        self._entries = entries
        self._key = key
        self._seen = 0

    def __aiter__(self) -> AsyncIterator[Entry]:
        return self

    async def __anext__(self) -> Entry:
        await anyio.lowlevel.checkpoint()
        while (entry := self._entries.get(self._key)) is None or entry.revision <= self._seen:
            await self._bus.changed()
        self._seen = entry.revision
        return entry


class _Reader:
    def __init__(
        self,
        bus: "MemoryBus",
        log: MemoryStream,
        filters: Sequence[str],
        *,
        start: int,
        headers_only: bool,
        follow: bool,
    ) -> None:
        self._bus = bus
        self._log = log
        self._filters = filters
        self._cursor = start
        self._headers_only = headers_only
        self._follow = follow
        self._target = log.last_seq

    @property
    def caught_up(self) -> bool:
        following = self._log.next_match(self._cursor, self._filters)
        return following is None or following.seq > self._target

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self

    async def __anext__(self) -> StoredMessage:
        if not self._follow and self.caught_up:
            raise StopAsyncIteration
        await anyio.lowlevel.checkpoint()
        while (message := self._log.next_match(self._cursor, self._filters)) is None:
            await self._bus.changed()
        self._cursor = message.seq + 1
        if not self._headers_only:
            return message
        return replace(message, data=b"", headers={**message.headers, SIZE_HEADER: str(len(message.data))})


class MemoryBus:
    """Implements `api.Bus` for one run, whichever that is.

    `max_bytes` is every stream's byte budget, or one for each by kind.

    Time is the event loop's; `advance` moves it on, so that a test need not wait for a redelivery.
    """

    def __init__(self, *, max_bytes: int | Mapping[str, int] = 1 << 30) -> None:
        self._logs = {
            name: MemoryStream(name, max_bytes if isinstance(max_bytes, int) else max_bytes.get(name, 1 << 30))
            for name in STREAMS
        }
        self._entries: dict[str, Entry] = {}
        self._revision = 0
        self._damaged: set[str] = set()
        self._talk = UnstoredMessages()
        self._change = anyio.Event()
        self._skipped = 0.0
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def server(self) -> None:
        return None

    @property
    def reconnects(self) -> int:
        return 0

    @property
    def stall(self) -> None:
        return None

    @property
    def acknowledged(self) -> Mapping[str, int]:
        return {}

    @property
    def unanswered(self) -> RefusedReplies:
        return RefusedReplies()

    async def close(self) -> None:
        """Fail every waiting and later call with `BusClosedError`."""
        self._closed = True
        self._talk.close()
        self.wake()

    def now(self) -> float:
        """Return the bus's time, seconds."""
        return anyio.current_time() + self._skipped

    def advance(self, seconds: float) -> None:
        """Move the bus's time on: what was lent for longer than its acknowledgement wait is delivered again."""
        self._skipped += seconds
        self.wake()

    def damage(self, stream: str, seq: int) -> None:
        """Make a stored message unreadable, for tests; see `MemoryStream.damage`."""
        self._log(stream).damage(seq)

    def damage_value(self, key: str) -> None:
        """Make a key's value unreadable until it is set again, for tests."""
        self._damaged.add(key)

    def wake(self) -> None:
        """Let everything that waits look again."""
        self._change.set()
        self._change = anyio.Event()

    async def changed(self, until: float | None = None) -> None:
        """Wait for a change, or for the bus's time `until`."""
        self._check_open()
        with anyio.move_on_after(None if until is None else max(0.0, until - self.now())):
            await self._change.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosedError("the bus was closed")

    def _log(self, stream: str) -> MemoryStream:
        self._check_open()
        if stream not in self._logs:
            raise NotFoundError(f"there is no stream {stream!r}; there are {', '.join(self._logs)}")
        return self._logs[stream]

    async def _append(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        headers: Mapping[str, str] | None,
        expected: int | None = None,
        limit: int | None = MAX_MESSAGE_BYTES,
    ) -> PubAck:
        log = self._log(stream_of(subject))
        await anyio.lowlevel.checkpoint()
        if limit is not None and len(data) > limit:
            raise DataError(f"{subject}: {len(data)} bytes where a message may have {limit}; use publish_large")
        ack = log.append(
            subject, data, msg_id=msg_id, headers=headers, expected=expected, now=self.now(), time_ns=time.time_ns()
        )
        self.wake()
        return ack

    async def publish(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        return await self._append(subject, data, msg_id=msg_id, headers=headers)

    async def publish_large(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        return await self._append(subject, data, msg_id=msg_id, headers=headers, limit=None)

    async def commit(
        self, subject: str, data: bytes, *, expected: int, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        return (await self._append(subject, data, msg_id=msg_id, headers=headers, expected=expected)).seq

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        return self._log(stream).last(subject)

    async def get(self, stream: str, seq: int) -> StoredMessage:
        return self._log(stream).get(seq)

    async def get_head(self, stream: str, seq: int, *, leader: bool = False) -> StoredMessage:
        return self._log(stream).get(seq)

    async def fetch(
        self, stream: str, seqs: Sequence[int], subject: str | None = None
    ) -> AsyncGenerator[StoredMessage]:
        for seq in seqs:
            await anyio.lowlevel.checkpoint()
            yield self._log(stream).get(seq)

    async def trim(self, stream: str, filters: Sequence[str], *, before: int) -> int:
        return self._log(stream).trim(filters, before)

    async def delete_orphan_chunks(
        self, stream: str, *, before_ns: int, note: Callable[[Sequence[int]], Awaitable[None]]
    ) -> int:
        self._log(stream)
        return 0  # a large message has no chunks here

    @asynccontextmanager
    async def consume(
        self,
        stream: str,
        durable: str,
        filters: Sequence[str],
        *,
        max_messages: int = 64,
        max_bytes: int = 16 << 20,
        ack_wait_s: float = 30.0,
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        log = self._log(stream)
        consumer = log.consumers.setdefault(durable, MemoryConsumer(log, tuple(filters), ack_wait_s))
        consumer.ack_wait_s = ack_wait_s
        yield _MemoryDeliveries(self, consumer, max_messages, max_bytes)

    @asynccontextmanager
    async def read(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        start: int = 1,
        headers_only: bool = False,
        follow: bool = True,
        max_bytes: int = 16 << 20,  # nothing is buffered here
        gather_s: float = 0.0,  # nor is a lone message dear
    ) -> AsyncIterator[Reader]:
        log = self._log(stream)
        if start - 1 > log.last_seq:
            raise HistoryLostError(
                f"stream {stream} ends at sequence {log.last_seq}, but {start - 1} was read already: history was lost"
            )
        yield _Reader(self, log, filters, start=start, headers_only=headers_only, follow=follow)

    async def lag(self, stream: str, durable: str) -> ConsumerLag:
        consumer = self._log(stream).consumers.get(durable)
        if consumer is None:
            raise NotFoundError(f"stream {stream} has no consumer {durable!r}")
        consumer.expire(self.now())
        return consumer.lag()

    async def usage(self, stream: str) -> StreamUsage:
        return self._log(stream).usage()

    async def extent(self, stream: str, subject: str) -> StreamExtent:
        return self._log(stream).extent(subject)

    async def server_time_ns(self) -> int:
        await anyio.lowlevel.checkpoint()
        return time.time_ns()

    async def stored_keys(self) -> list[str]:
        await anyio.lowlevel.checkpoint()
        return sorted(self._entries)

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        check_key(key)
        self._check_open()
        await anyio.lowlevel.checkpoint()
        is_readable = key in self._entries and key not in self._damaged
        current = self._entries[key].revision if is_readable else 0
        if revision is not None and revision != current:
            raise FencedError(f"key {key}: its revision is {current}, not {revision}")
        self._revision += 1
        self._entries[key] = Entry(key, bytes(value), self._revision)
        self._damaged.discard(key)
        self.wake()
        return self._revision

    async def value(self, key: str) -> Entry | None:
        check_key(key)
        self._check_open()
        if key in self._damaged:
            raise DamagedError(f"key {key}: the value is damaged")
        return self._entries.get(key)

    async def delete(self, key: str) -> None:
        check_key(key)
        self._check_open()
        await anyio.lowlevel.checkpoint()
        self._entries.pop(key, None)

    @asynccontextmanager
    async def watch(self, key: str) -> AsyncIterator[AsyncIterator[Entry]]:
        check_key(key)
        yield _LastValue(self, self._entries, key)

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        self._check_open()
        return await self._talk.request(subject, data, timeout_s)

    def serve(
        self, subject: str, handler: Callable[[bytes], Awaitable[bytes]], *, at_once: int = 1
    ) -> AbstractAsyncContextManager[None]:
        self._check_open()
        return self._talk.serve(subject, handler, at_once)

    async def broadcast(self, subject: str, data: bytes) -> None:
        self._check_open()
        if any(token in ("*", ">") for token in subject.split(".")):
            raise ConfigError(f"broadcast to {subject!r}: a wildcard is no subject")
        self._talk.broadcast(subject, data)

    def listen(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[AsyncIterator[StoredMessage]]:
        self._check_open()
        return self._talk.listen(subject, limit)
