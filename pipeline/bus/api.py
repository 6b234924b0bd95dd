"""Defines the interface of the bus, implemented by `NatsBus` and, in memory, by `MemoryBus`.

A bus is opened for one run, which has streams and a key-value bucket of its own. A stream is named by its kind
(`subjects.ROLLOUTS`...), a key by `schemas.keys`; subjects name the run themselves.

What every implementation guarantees:

* `publish` returns once the message is stored, and stores it once for each message id within the duplicate window,
  across reconnects. Bytes waiting for their acknowledgement are bounded.
* `commit` stores a message only when its subject's last sequence is the expected one. It is the fence of every
  single-writer subject.
* `consume` is for competing consumers: a message is redelivered to any replica until it is acknowledged.
* `read` is for single readers that keep their own cursor: in stream order, nothing acknowledged, resumed without a gap
  or a repeat after a reconnect.
* Sequences are those of the stream and begin at 1.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from lachesis.pipeline.bus.reply_subjects import RefusedReplies
from lachesis.pipeline.bus.server_waits import ServerStall

__all__ = [
    "Bus",
    "ConsumerLag",
    "Delivery",
    "Entry",
    "PubAck",
    "Reader",
    "StoredMessage",
    "StreamExtent",
    "StreamUsage",
]


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as stored. `data` is empty in a headers-only read; `time_ns` is the server's Unix time."""

    stream: str
    subject: str
    seq: int
    data: bytes
    time_ns: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PubAck:
    """`duplicate` says that this message id had been stored before; `seq` is then the earlier one's."""

    stream: str
    seq: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A key-value entry; `revision` is what a compare-and-set names."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """`pending` messages have not been delivered yet, `unacked` are held by replicas or were given back and wait for
    their next delivery; `redelivered` of those came again.

    Every message up to and including sequence `ack_floor` has been acknowledged.
    """

    pending: int
    unacked: int
    redelivered: int
    ack_floor: int


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """`last` is 0 and `first` 1 in a stream that never held a message; `max_bytes` is its byte budget.

    `lost_bytes` of the store could not be read when the server started: what they held is gone. `last_ns` is when the
    last message was stored (Unix time), 0 if there never was one. `created` is the server's time at which it made the
    stream, which no other stream of that name has.
    """

    first: int
    last: int
    messages: int
    bytes: int
    max_bytes: int
    lost_bytes: int = 0
    last_ns: int = 0
    created: str = ""


@dataclass(frozen=True, slots=True)
class StreamExtent:
    """What one server has of a stream: everything up to sequence `last`, `messages` of it on one subject."""

    last: int
    messages: int


class Delivery(Protocol):
    """A message lent to this replica until it is acknowledged. `attempt` counts deliveries from 1.

    None of the three answers raises when the connection is down: the message then simply comes again.
    """

    @property
    def message(self) -> StoredMessage: ...
    @property
    def attempt(self) -> int: ...
    async def ack(self) -> None: ...
    async def nak(self, delay_s: float = 0.0) -> None:
        """Give the message back; it is delivered again, to any replica, after `delay_s` seconds."""

    async def in_progress(self) -> None:
        """Say that the message is still being worked on, which restarts its acknowledgement timer."""


class Reader(Protocol):
    """An open `read`. Iterating it waits for further messages for ever, unless it was opened without `follow`."""

    def __aiter__(self) -> AsyncIterator[StoredMessage]: ...

    @property
    def caught_up(self) -> bool:
        """Whether everything that was in the stream when the reader was opened has been handed out."""


class Bus(Protocol):
    """See the module's docstring. Every call may raise `InfrastructureError`; `BusClosedError` once it is closed."""

    @property
    def server(self) -> tuple[str, int] | None:
        """Host and port of the server that the bus is connected to; None: it is not, or there is none."""

    @property
    def reconnects(self) -> int:
        """How often the connection was lost since it was made: what the server holds may be otherwise then."""

    @property
    def stall(self) -> ServerStall | None:
        """The wait for the server that has lasted longest, once it is more than a few seconds.

        None: there is none.
        """

    @property
    def acknowledged(self) -> Mapping[str, int]:
        """By kind of stream, the highest sequence of a message of this process that the server acknowledged."""

    @property
    def unanswered(self) -> RefusedReplies:
        """The requests that got no answer because they named a reply subject that may not be answered."""

    async def publish(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """Store a message; waits, without bound, for room in the window and for the server to come back.

        Raises `StreamFullError` when the stream is at its byte budget: the caller decides whether to wait.
        """

    async def publish_large(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """As `publish`; data over the inline limit is stored as chunks first, then as a head that lists them.

        Readers see one message: `get`, `fetch` and `consume` put the chunks together and verify them.
        """

    async def commit(
        self, subject: str, data: bytes, *, expected: int, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        """Store a message if its subject's last sequence is `expected` (0: none yet) and return its sequence.

        After a timeout or reconnect the outcome is settled by reading the subject's last message: the same message id
        means success. Raises `FencedError` when another writer got there first.
        """

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """Return the subject's last message, read from the leader.

        None: there is none, because none was ever stored or all were deleted on purpose. A large one that cannot be
        assembled is marked as `read` marks it: another key may have stored it. Raises `DamagedError` when there are
        some and the newest of them cannot be read.
        """

    async def get(self, stream: str, seq: int) -> StoredMessage:
        """Return one message by sequence. Raises `NotFoundError`."""

    async def get_head(self, stream: str, seq: int, *, leader: bool = False) -> StoredMessage:
        """Return one message by sequence, a large one without the chunks of its data. Raises `NotFoundError`.

        `leader`: as the stream's leader has it, for what decides something.
        """

    def fetch(self, stream: str, seqs: Sequence[int], subject: str | None = None) -> AsyncGenerator[StoredMessage]:
        """Yield the messages at `seqs`, in the order given, several requests outstanding, bounded in bytes.

        Ask in ascending order: it is several times faster. With `subject`, which they all lie on, rising, one request
        asks for many of them: twice as fast where they are most of what lies on it from the first to the last. Raises
        `NotFoundError` naming the sequence.
        """

    def consume(
        self,
        stream: str,
        durable: str,
        filters: Sequence[str],
        *,
        max_messages: int = 64,
        max_bytes: int = 16 << 20,
        ack_wait_s: float = 30.0,
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Join the competing consumers of `durable`, which is created if need be and never deleted.

        At most `max_messages` and `max_bytes` are held by this replica and not yet acknowledged or given back (one
        message larger than `max_bytes` still comes, alone). Leaving the context gives back what was not handed out.
        """

    def read(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        start: int = 1,
        headers_only: bool = False,
        follow: bool = True,
        max_bytes: int = 16 << 20,
        gather_s: float = 0.0,
    ) -> AbstractAsyncContextManager[Reader]:
        """Read from sequence `start` on, in stream order. Without `follow` iteration ends once caught up.

        With `gather_s` (seconds) what is stored meanwhile may come together, up to so much later: for readers that need
        not be quick, since a message that comes alone costs more than one among others.

        What the server cannot read of a damaged store is passed over: callers that need all of it must check that it
        is there.

        Raises `HistoryLostError` when the stream ends before `start` - 1, or no longer holds what was read of it: the
        broker's store was rolled back, and what now comes under those sequences would be passed over.
        """

    async def trim(self, stream: str, filters: Sequence[str], *, before: int) -> int:
        """Delete what lies below sequence `before` on `filters` and return how many messages went.

        The last message of every subject stays, whatever `before` is. A large message's chunks stay and go with it.
        """

    async def delete_orphan_chunks(
        self, stream: str, *, before_ns: int, note: Callable[[Sequence[int]], Awaitable[None]]
    ) -> int:
        """Delete the chunks that no stored message lists and that ended before Unix time `before_ns`.

        Their sequences are given to `note` before anything is deleted. Returns how many went. A producer that has not
        stored their head yet never will: it sends them all again.
        """

    async def lag(self, stream: str, durable: str) -> ConsumerLag:
        """Raises `NotFoundError` when there is no such consumer."""

    async def usage(self, stream: str) -> StreamUsage: ...

    async def extent(self, stream: str, subject: str) -> StreamExtent:
        """Return how far the stream goes, and how many messages are on `subject`: both as one server has them.

        That server may lag behind, as any may that a question reaches, but then `last` says so.
        """

    async def server_time_ns(self) -> int:
        """Return the Unix time by the server's clock, as of its answer."""

    async def stored_keys(self) -> list[str]:
        """Return the keys in the run's bucket that have a value, or the mark of a deleted one, in order."""

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        """Set a key of the run's bucket and return the new revision.

        With `revision` it is set only if that is the current one (0: the key must not exist).

        Raises `FencedError` when it is not.
        """

    async def value(self, key: str) -> Entry | None:
        """Return a key's entry, None where it was never set or was removed. Raises `DamagedError` as `last`."""

    async def delete(self, key: str) -> None:
        """Remove a key, if it is there; it takes no room any more. Watchers are not notified."""

    def watch(self, key: str) -> AbstractAsyncContextManager[AsyncIterator[Entry]]:
        """Yield the key's value (if it has one) and every later one; of several missed ones only the newest."""

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Ask a service and return its answer.

        Raises `UnservedError` if no process serves it, `InfrastructureError` on no answer in time, and a `DataError` or
        `InfrastructureError` that the service's handler raised.
        """

    def serve(
        self, subject: str, handler: Callable[[bytes], Awaitable[bytes]], *, at_once: int = 1
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests on `subject`, `at_once` at a time, while the context is open; replicas share them.

        A `DataError` or `InfrastructureError` of the handler is raised at the requester; anything else ends the
        context.
        """

    async def broadcast(self, subject: str, data: bytes) -> None:
        """Send to all current listeners. Nothing is stored, and nothing is raised if there are none."""

    def listen(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[AsyncIterator[StoredMessage]]:
        """Yield broadcasts; beyond `limit` unread ones, or 16 MiB of them, the oldest are dropped.

        `stream` is empty and `seq` 0.
        """
