"""Everything that a run has stored, read once and decoded: what the checks of the audit look at."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.retention.holds import read_record
from lachesis.schemas import subjects
from lachesis.schemas.annotations import CurriculumEvent, DeadLetter, RewardEvent, ScoreEvent, TeacherEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry, TrainReport
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

__all__ = ["Annotation", "Entry", "History", "Rollout", "read_history"]

Annotation = ScoreEvent | RewardEvent | CurriculumEvent | TeacherEvent | DeadLetter
_KINDS: dict[str, type[Annotation]] = {
    "score": ScoreEvent,
    "reward": RewardEvent,
    "curriculum": CurriculumEvent,
    "teacher": TeacherEvent,
    "dead": DeadLetter,
}


@dataclass(frozen=True, slots=True)
class Rollout:
    """A message of ROLLOUTS. `plan` is None where its header cannot be read."""

    seq: int
    env: str
    plan: Plan | None
    time_ns: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A ledger entry with its place and time in the stream."""

    seq: int
    time_ns: int
    entry: LedgerEntry


@dataclass(slots=True)
class History:
    """The streams of one run, each in its own order."""

    run: str
    trainer: str
    rollouts: list[Rollout] = field(default_factory=list)
    annotations: list[tuple[int, Annotation]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    report: TrainReport | None = None
    chunks: set[str] = field(default_factory=set)
    """Subjects of stored chunks of large messages."""
    heads: set[str] = field(default_factory=set)
    """The same, as the stored heads name them."""
    sequences: dict[str, set[int]] = field(default_factory=dict)
    """Sequences present by stream, of the run's rollouts, annotations and ledger entries."""
    trimmed: dict[str, int] = field(default_factory=dict)
    """By stream, the sequence below which the governor says that it deleted what was not needed."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing was deleted, so that one pass over all of it can be made."""
        return not any(self.trimmed.get(stream, 1) > 1 for stream in (subjects.ROLLOUTS, subjects.EVENTS))


async def read_history(bus: Bus, run: str, trainer: str = "main") -> History:
    """Read everything. It must hold still meanwhile."""
    history = History(run, trainer)
    seen = history.sequences = {name: set() for name in (subjects.ROLLOUTS, subjects.EVENTS, subjects.LEDGER)}
    async for message in _all(bus, subjects.ROLLOUTS, subjects.rollout(run), headers_only=True):
        seen[subjects.ROLLOUTS].add(message.seq)
        try:
            plan = Plan.unpack(message.headers.get(PLAN_HEADER))
        except SchemaError:
            plan = None
        history.rollouts.append(Rollout(message.seq, message.subject.rsplit(".", 1)[-1], plan, message.time_ns))
        if LARGE_HEADER in message.headers:
            history.heads.add(message.headers[LARGE_HEADER])
    async for message in _all(bus, subjects.ROLLOUTS, subjects.blob("rollout", run), headers_only=True):
        history.chunks.add(message.subject)
    async for message in _all(bus, subjects.EVENTS, f"rl.*.{run}.{subjects.LIVE}.*"):
        seen[subjects.EVENTS].add(message.seq)
        kind = _KINDS.get(message.subject.split(".")[1])
        if kind is not None:
            history.annotations.append((message.seq, decode(kind, message.data)))
    async for message in _all(bus, subjects.LEDGER, subjects.ledger(run, trainer)):
        seen[subjects.LEDGER].add(message.seq)
        history.entries.append(Entry(message.seq, message.time_ns, decode(LedgerEntry, message.data)))
    history.trimmed = dict((await read_record(bus, run)).trimmed)
    report = await bus.last(subjects.LEDGER, subjects.state(run, "trainer", subjects.LIVE, trainer))
    history.report = decode(TrainReport, report.data) if report else None
    return history


async def _all(bus: Bus, stream: str, subject: str, *, headers_only: bool = False) -> AsyncIterator[StoredMessage]:
    async with bus.read(stream, [subject], headers_only=headers_only, follow=False) as messages:
        async for message in messages:
            yield message
