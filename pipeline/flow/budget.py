"""The byte budgets: what the streams hold, and what has been promised room in them but is not stored yet. Pure.

Guarantees that promises and what is stored together stay below the closing share of every stream's budget. Bytes that
were just stored count twice until the stream's figures are read again.
"""

from collections import deque
from dataclasses import dataclass, field

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS, TEACHER

__all__ = ["Budget", "Room"]

_LEAST_BYTES_PER_TOKEN = 8
"""A token of a rollout takes at least its id (4 bytes) and its logprob (4 bytes); hence tokens <= bytes / 8."""
_BLIND_S = 5.0
"""Age of the streams' figures, seconds, from which they are no longer trusted."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes a group needs, by stream, at the worst."""

    rollouts: int = 0
    events: int = 0
    teacher: int = 0

    @classmethod
    def of(cls, config: FlowConfig, *, sequences: int, bytes_: int, tokens: int | None = None) -> "Room":
        """Return what a group of so many sequences and bytes needs; `tokens` where they are known."""
        tokens = bytes_ // _LEAST_BYTES_PER_TOKEN if tokens is None else tokens
        return cls(
            rollouts=bytes_,
            events=config.event_bytes_per_group + sequences * config.event_bytes_per_sequence,
            teacher=tokens * config.teacher_bytes_per_token,
        )

    def __add__(self, other: "Room") -> "Room":
        return Room(self.rollouts + other.rollouts, self.events + other.events, self.teacher + other.teacher)

    def __sub__(self, other: "Room") -> "Room":
        return Room(self.rollouts - other.rollouts, self.events - other.events, self.teacher - other.teacher)


@dataclass(slots=True)
class Budget:
    """`promised` is what leases and rollouts without an outcome may still write."""

    config: FlowConfig
    promised: Room = field(default_factory=Room)
    _usage: dict[str, StreamUsage] = field(default_factory=dict)
    _read_at: float | None = None
    _landing: deque[tuple[float, int]] = field(default_factory=deque)

    def landed(self, now: float, bytes_: int) -> None:
        """Say that a rollout was stored: its bytes stay counted until figures read after `now` contain them."""
        self._landing.append((now, bytes_))

    def read(self, now: float, usage: dict[str, StreamUsage]) -> None:
        """Take in the figures of all streams, asked for at time `now`."""
        self._usage = usage
        self._read_at = now
        while self._landing and self._landing[0][0] < now:
            self._landing.popleft()

    def fill(self) -> dict[str, float]:
        """Return by stream the share of its budget that is stored or promised; empty before the first figures."""
        promised = {
            ROLLOUTS: self.promised.rollouts + sum(bytes_ for _, bytes_ in self._landing),
            EVENTS: self.promised.events,
            TEACHER: self.promised.teacher,
            LEDGER: 0,
        }
        return {
            stream: (self._usage[stream].bytes + more) / self._usage[stream].max_bytes
            for stream, more in promised.items()
            if stream in self._usage and self._usage[stream].max_bytes > 0
        }

    def refusal(self, now: float, asked: Room) -> str | None:
        """Return why no room can be promised to `asked`, or None if it can."""
        if self._read_at is None or now - self._read_at > _BLIND_S:
            return "the streams' usage is unknown: the broker does not answer"
        wanted = {ROLLOUTS: asked.rollouts, EVENTS: asked.events, TEACHER: asked.teacher, LEDGER: 0}
        for stream, share in self.fill().items():
            budget = self._usage[stream].max_bytes
            if share * budget + wanted[stream] > self.config.close_at * budget:
                return (
                    f"stream {stream} is {share:.0%} full with what is promised, of {budget} bytes; leases close at "
                    f"{self.config.close_at:.0%}: trim history or raise its budget"
                )
        return None
