"""A stream and its durable consumers in memory.

State machines without tasks or clocks, stepped by `memory_bus.MemoryBus`.

Guarantees what a JetStream stream with `discard=new` does: sequences from 1 without reuse, one message for each id in
the duplicate window, the expected-sequence fence, a byte budget, redelivery for ever. Times are seconds, given in.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lachesis.pipeline.bus.api import ConsumerLag, PubAck, StoredMessage, StreamExtent, StreamUsage
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, matches
from lachesis.pipeline.errors import DamagedError, FencedError, NotFoundError, StreamFullError

__all__ = ["MemoryConsumer", "MemoryStream", "size_of"]

DUPLICATE_WINDOW_S = 600.0
_OVERHEAD_BYTES = 30  # what the server's file store adds to a message, about


def size_of(message: StoredMessage) -> int:
    """Return what a message weighs in its stream's budget, bytes."""
    headers = sum(len(key) + len(value) + 4 for key, value in message.headers.items())
    return len(message.subject) + len(message.data) + headers + _OVERHEAD_BYTES


class MemoryStream:
    """One stream."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self.name = name
        self.max_bytes = max_bytes
        self.last_seq = 0
        self.consumers: dict[str, MemoryConsumer] = {}
        self._messages: dict[int, StoredMessage] = {}
        self._last_of: dict[str, int] = {}
        self._ids: dict[str, tuple[int, float]] = {}
        self._bytes = 0
        self._damaged: set[int] = set()

    def append(
        self,
        subject: str,
        data: bytes,
        *,
        msg_id: str,
        headers: Mapping[str, str] | None,
        expected: int | None,
        now: float,
        time_ns: int,
    ) -> PubAck:
        """Store a message. Raises `FencedError`, `DamagedError` where its subject is, and `StreamFullError`."""
        self._forget_ids(now)
        last = self._last_of.get(subject, 0)
        if expected is not None and last in self._damaged:
            if expected:
                self.last(subject)  # raises
            last = 0  # to the server it is not there
        if expected is not None and last != expected:
            if last and self._messages[last].headers.get(MSG_ID_HEADER) == msg_id:
                return PubAck(self.name, last, duplicate=True)
            raise FencedError(f"{subject}: last sequence is {last}, not {expected}; another writer has taken over")
        known = self._ids.get(msg_id)
        if known is not None:
            return PubAck(self.name, known[0], duplicate=True)
        message = StoredMessage(
            self.name, subject, self.last_seq + 1, bytes(data), time_ns, {**(headers or {}), MSG_ID_HEADER: msg_id}
        )
        if self._bytes + size_of(message) > self.max_bytes:
            raise StreamFullError(f"stream {self.name} is at its budget of {self.max_bytes} bytes")
        self.last_seq = message.seq
        self._messages[message.seq] = message
        self._last_of[subject] = message.seq
        self._ids[msg_id] = (message.seq, now)
        self._bytes += size_of(message)
        return PubAck(self.name, message.seq, duplicate=False)

    def _forget_ids(self, now: float) -> None:
        for msg_id, (_, stored) in list(self._ids.items()):  # oldest first
            if now - stored < DUPLICATE_WINDOW_S:
                break
            del self._ids[msg_id]

    def damage(self, seq: int) -> None:
        """Make a message unreadable, as a server finds it whose disk has changed a byte.

        Still counted, never given.
        """
        self._damaged.add(seq)

    def get(self, seq: int) -> StoredMessage:
        message = self.find(seq)
        if message is None:
            raise NotFoundError(f"stream {self.name} has no message at sequence {seq}")
        return message

    def find(self, seq: int) -> StoredMessage | None:
        return None if seq in self._damaged else self._messages.get(seq)

    def last(self, subject: str) -> StoredMessage | None:
        """Return the last message on `subject`, None where there is none. Raises `DamagedError`."""
        seq = max((last for other, last in self._last_of.items() if matches(subject, other)), default=0)
        if seq in self._damaged:
            count = self.extent(subject).messages
            raise DamagedError(f"stream {self.name} counts {count} messages on {subject}, but its newest is damaged")
        return self._messages.get(seq)

    def next_match(self, start: int, filters: Sequence[str]) -> StoredMessage | None:
        """Return the first message at or after `start` that a filter covers (no filters: any)."""
        return next(self.matching(start, filters), None)

    def matching(self, start: int, filters: Sequence[str]) -> Iterator[StoredMessage]:
        for seq in range(start, self.last_seq + 1):
            message = self.find(seq)
            if message is not None and (not filters or any(matches(f, message.subject) for f in filters)):
                yield message

    def trim(self, filters: Sequence[str], before: int) -> int:
        """Delete what `filters` cover below `before` but the last message of every subject.

        Return how many went.
        """
        kept = set(self._last_of.values())
        gone = [m for m in self.matching(1, filters) if m.seq < before and m.seq not in kept]
        for message in gone:
            del self._messages[message.seq]
            self._bytes -= size_of(message)
        return len(gone)

    def usage(self) -> StreamUsage:
        first = next(iter(self._messages), self.last_seq + 1)
        last = self._messages.get(self.last_seq)
        return StreamUsage(
            first, self.last_seq, len(self._messages), self._bytes, self.max_bytes, last_ns=last.time_ns if last else 0
        )

    def extent(self, subject: str) -> StreamExtent:
        return StreamExtent(
            self.last_seq, sum(matches(subject, message.subject) for message in self._messages.values())
        )


@dataclass(slots=True)
class _PendingAck:
    attempt: int
    deadline: float


@dataclass(slots=True)
class MemoryConsumer:
    """A durable consumer that any number of replicas share."""

    log: MemoryStream
    filters: tuple[str, ...]
    ack_wait_s: float
    _next: int = 1
    _lent: dict[int, _PendingAck] = field(default_factory=dict)
    _waiting: dict[int, _PendingAck] = field(default_factory=dict)  # given back: redelivered at `deadline`

    def lend(self, now: float) -> tuple[StoredMessage, int] | None:
        """Lend the next message that is due and return it with its delivery count, or None."""
        self.expire(now)
        due = min((seq for seq, lent in self._waiting.items() if lent.deadline <= now), default=None)
        if due is not None:
            attempt = self._waiting.pop(due).attempt + 1
            message = self.log.find(due)
            if message is None:  # trimmed meanwhile
                return self.lend(now)
        else:
            message = self.log.next_match(self._next, self.filters)
            if message is None:
                return None
            self._next, attempt = message.seq + 1, 1
        self._lent[message.seq] = _PendingAck(attempt, now + self.ack_wait_s)
        return message, attempt

    def expire(self, now: float) -> None:
        """Take back what was neither acknowledged nor kept alive in time."""
        for seq in [seq for seq, lent in self._lent.items() if lent.deadline <= now]:
            self._waiting[seq] = self._lent.pop(seq)

    def next_due(self) -> float | None:
        """Return when a message will next become due by itself."""
        return min((lent.deadline for lent in (*self._lent.values(), *self._waiting.values())), default=None)

    def ack(self, seq: int) -> None:
        self._lent.pop(seq, None)
        self._waiting.pop(seq, None)

    def nak(self, seq: int, due: float) -> None:
        lent = self._lent.pop(seq, None)
        if lent is not None:
            self._waiting[seq] = _PendingAck(lent.attempt, due)

    def in_progress(self, seq: int, now: float) -> None:
        if seq in self._lent:
            self._lent[seq].deadline = now + self.ack_wait_s

    def lag(self) -> ConsumerLag:
        open_ = {**self._lent, **self._waiting}
        # the attempt counts deliveries made, so a message given back once and not yet lent again is not "again" yet
        again = sum(lent.attempt > 1 for lent in open_.values())
        floor = min(open_, default=self._next) - 1
        pending = sum(1 for _ in self.log.matching(self._next, self.filters))
        return ConsumerLag(pending, len(open_), again, floor)
