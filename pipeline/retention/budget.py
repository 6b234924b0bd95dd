"""Counts the bytes of each stream against its budget: stored, and reserved but not stored yet. Pure.

The streams are the run's own, so no other program stores anything in them. Guarantees that no promise can bring a
stream above the closing share of its budget. Bytes that were just stored count twice until the figures are read again.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.retention.config import RetentionConfig
from lachesis.schemas.subjects import CALLS, EVENTS, LEDGER, ROLLOUTS, TEACHER

__all__ = ["MEASURED_STREAMS", "MIN_BYTES_PER_TOKEN", "Budget", "ByteReservation", "StreamPressure"]

MIN_BYTES_PER_TOKEN = 6
"""A token of a rollout takes at least half its id (2 bytes) and its logprob (4 bytes), so tokens <= bytes / 6."""
MEASURED_STREAMS = (ROLLOUTS, EVENTS, TEACHER, LEDGER, CALLS)
"""The streams that have a byte budget to measure."""
_STALE_MEASUREMENT_S = 5.0
"""Age of the streams' figures, seconds, after which they are no longer trusted."""


class ByteRules(Protocol):
    """How much is reserved for a group, and how full a stream may be: a part of the section [flow]."""

    @property
    def close_at(self) -> float: ...
    @property
    def event_bytes_per_group(self) -> int: ...
    @property
    def event_bytes_per_sequence(self) -> int: ...
    @property
    def teacher_bytes_per_token(self) -> int: ...
    @property
    def retention(self) -> RetentionConfig: ...


@dataclass(frozen=True, slots=True)
class ByteReservation:
    """Bytes, by stream, that may still be needed."""

    rollouts: int = 0
    events: int = 0
    teacher: int = 0
    calls: int = 0

    @classmethod
    def of(
        cls, config: ByteRules, *, sequences: int, bytes_: int = 0, tokens: int | None = None, calls: int = 0
    ) -> "ByteReservation":
        """Return the needs of a group: of `bytes_` if it is not stored yet, of `tokens` if it is stored.

        `calls`: bytes that its calls may take.
        """
        tokens = bytes_ // MIN_BYTES_PER_TOKEN if tokens is None else tokens
        return cls(
            rollouts=bytes_,
            events=config.event_bytes_per_group + sequences * config.event_bytes_per_sequence,
            teacher=tokens * config.teacher_bytes_per_token,
            calls=calls,
        )

    def by_stream(self) -> dict[str, int]:
        return {ROLLOUTS: self.rollouts, EVENTS: self.events, TEACHER: self.teacher, LEDGER: 0, CALLS: self.calls}


class StreamPressure(NamedTuple):
    """`excess` bytes should be deleted from a stream; refused producers wait until `short` of them are."""

    excess: int = 0
    short: int = 0


class Budget:
    """Call `promise` and `release` around everything that may still write, and `update` when new figures arrive."""

    def __init__(self, config: ByteRules) -> None:
        self._config = config
        self._promised = dict.fromkeys(ByteReservation().by_stream(), 0)
        self._usage: Mapping[str, StreamUsage] = {}
        self._read_s: float | None = None
        self.disk_bytes: int | None = None
        """Bytes that may still be stored before the disk under the streams is nearly full; None: not known."""
        self._landing: deque[tuple[float, int]] = deque()
        self._wanted: dict[str, int] = {}
        self._why: dict[str, str] = {}

    def promise(self, room: ByteReservation) -> None:
        for stream, size in room.by_stream().items():
            self._promised[stream] += size

    def is_mostly_promised(self, stream: str) -> bool:
        """Return whether more bytes of a stream are promised than stored: trimming would make little room."""
        usage = self._usage.get(stream)
        return usage is not None and self._promised[stream] > usage.bytes

    def explain_promises(self, stream: str) -> str:
        """Say how much of a stream is stored, how much is promised, and how to get more room."""
        return (
            f"it holds {self._usage[stream].bytes:,} bytes, and {self._promised[stream]:,} more are promised to groups "
            "under way: wait until they end, or lower environments.*.longest_tokens or samples, or raise "
            f"streams.{stream.lower()}_bytes"
        )

    def release(self, room: ByteReservation) -> None:
        for stream, size in room.by_stream().items():
            self._promised[stream] -= size

    def landed(self, now_s: float, size: int) -> None:
        """Record a stored rollout: its bytes count until figures requested after `now_s` contain them."""
        self._landing.append((now_s, size))
        self._promised[ROLLOUTS] += size

    def update(self, now_s: float, usage: Mapping[str, StreamUsage]) -> None:
        """Record the figures of the streams, requested at `now_s`."""
        self._usage = usage
        self._read_s = now_s
        while self._landing and self._landing[0][0] < now_s:
            self._promised[ROLLOUTS] -= self._landing.popleft()[1]

    def fill(self) -> dict[str, float]:
        """Return, by stream, the share of its budget that is stored or promised."""
        return {
            stream: (self._usage[stream].bytes + promised) / self._usage[stream].max_bytes
            for stream, promised in self._promised.items()
            if stream in self._usage and self._usage[stream].max_bytes > 0
        }

    def is_blind(self, now_s: float) -> bool:
        """Whether the figures are missing or too old, so that nothing may be promised."""
        return self._read_s is None or now_s - self._read_s > _STALE_MEASUREMENT_S

    def reason_never_possible(self, room: ByteReservation) -> str | None:
        """Return why `room` could not be promised even if the streams were empty; None if it could."""
        for stream, size in room.by_stream().items():
            usage = self._usage.get(stream)
            if usage is None or usage.max_bytes <= 0:
                continue
            most = int(self._config.close_at * usage.max_bytes)
            if size > most:
                return (
                    f"a group that may need {size} bytes in stream {stream} can never be admitted: {most} are all "
                    f"there is; make groups smaller, or raise streams.{stream.lower()}_bytes"
                )
        return None

    def refusal_reason(self, room: ByteReservation) -> str | None:
        """Return why `room` cannot be promised; None if it can."""
        everything = sum(self._promised.values()) + sum(room.by_stream().values())
        if self.disk_bytes is not None and everything > self.disk_bytes:
            return (
                f"the disk of the streams is nearly full: {self.disk_bytes:,} bytes may still be stored, and "
                f"{everything:,} would be promised; make room there, and the run goes on by itself"
            )
        for stream, size in room.by_stream().items():
            usage = self._usage.get(stream)
            if usage is None or usage.max_bytes <= 0:
                continue
            promised = self._promised[stream] + size
            if usage.bytes + promised > self._config.close_at * usage.max_bytes:
                self._wanted[stream] = max(size, self._wanted.get(stream, 0))
                return (
                    f"stream {stream} holds {usage.bytes:,} bytes and {promised:,} more are promised, of "
                    f"{self._config.close_at:.0%} of {usage.max_bytes:,}; {self._why.get(stream) or 'trimming history'}"
                )
        return None

    def explain(self, stream: str, why: str | None) -> None:
        """Record what keeps a stream full and what to do about it; refusals repeat it.

        None: no reason is known.
        """
        if why is None:
            self._why.pop(stream, None)
        else:
            self._why[stream] = why

    def pressure(self, stream: str) -> StreamPressure:
        """Return how much should be trimmed from a stream, by the newest figures and the refusals since.

        Bytes stored since those figures count twice, so `short` may be more than there is in the stream.
        """
        usage, wanted = self._usage.get(stream), self._wanted.pop(stream, None)  # nothing is promised in LEDGER
        if usage is None or usage.max_bytes <= 0:
            return StreamPressure()
        retention = self._config.retention
        load = usage.bytes + self._promised[stream] + (wanted or 0)
        if load <= retention.trim_at * usage.max_bytes:
            return StreamPressure()
        excess = min(usage.bytes, math.ceil(load - retention.trim_to * usage.max_bytes))
        short = math.ceil(load - self._config.close_at * usage.max_bytes) if wanted is not None else 0
        return StreamPressure(excess, max(0, short))
