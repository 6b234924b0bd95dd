"""Makes of a group's records what a process needs to go on with it. Pure.

Guarantees that records of a life that another one has replaced are passed over, and that the calls of a conversation,
or of a branch of it, are those of the path to its newest one: what it has left behind where it diverged is no part of
it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from lachesis.schemas.calls import GroupEnd, GroupStart, SessionCall, SessionEnd, StoredRecord, ToolResults
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.errors import SchemaError

__all__ = ["RecordedGroup", "RecordedSession", "fold_records"]


@dataclass(slots=True)
class RecordedSession:
    """One attempt at a sample: its calls by index, what its tools answered by index and fork, its end if it has one."""

    calls: dict[int, SessionCall] = field(default_factory=dict)
    tools: dict[tuple[int, str], ToolResults] = field(default_factory=dict)
    end: SessionEnd | None = None

    @property
    def seconds(self) -> float:
        """Seconds of generation in all of its calls."""
        return sum(call.seconds for call in self.calls.values())

    @property
    def next_index(self) -> int:
        return max(self.calls, default=-1) + 1

    def branch(self, fork: str) -> list[SessionCall]:
        """Return the calls of a branch up to its newest one; "": of the conversation itself.

        Those before the branch are left out.
        """
        newest = max((index for index, call in self.calls.items() if call.fork == fork), default=None)
        return [] if newest is None else [call for call in self.path(newest) if call.fork == fork]

    def path(self, last: int) -> list[SessionCall]:
        """Return the calls from the first to `last`, each the parent of the next."""
        at: int | None = last
        found: list[SessionCall] = []
        while at is not None:
            call = self.calls.get(at)
            if call is None:
                return []  # a call is missing: nothing behind it can be gone on from
            found.append(call)
            at = call.parent
        return found[::-1]


@dataclass(slots=True)
class RecordedGroup:
    """What is stored of a group under way."""

    start: GroupStart
    sessions: dict[str, RecordedSession] = field(default_factory=dict)
    since_start: int = 0
    """Records stored since the newest start."""
    last_seq: int = 0
    """The sequence of the last record that was read."""

    @property
    def seconds(self) -> float:
        """Seconds of generation in all of its calls."""
        return sum(session.seconds for session in self.sessions.values())

    @property
    def n_calls(self) -> int:
        return sum(len(session.calls) for session in self.sessions.values())

    def session(self, name: str) -> RecordedSession:
        return self.sessions.setdefault(name, RecordedSession())


_KINDS: dict[str, type[Event]] = {
    "start": GroupStart,
    "call": SessionCall,
    "tools": ToolResults,
    "session": SessionEnd,
    "end": GroupEnd,
}


def fold_records(records: Iterable[StoredRecord]) -> RecordedGroup | None:
    """Return the group of which `records`, in stream order, are; None if it has ended, or no start.

    Raises `SchemaError` if a record cannot be read, since what comes behind it may rest on it.
    """
    start: GroupStart | None = None
    kept: list[tuple[int, SessionCall | ToolResults | SessionEnd]] = []
    since_start = last_seq = 0
    for record in records:
        event = decode(_KINDS[record.kind], record.data)
        last_seq = record.seq
        if isinstance(event, GroupStart):
            if start is None or event.life >= start.life:
                start, since_start = event, 0
                kept = [(seq, one) for seq, one in kept if not event.known_seq or seq <= event.known_seq]
            continue
        if start is None:
            raise SchemaError(f"a record of kind {record.kind} at sequence {record.seq} has no start before it")
        if getattr(event, "life", 0) < start.life:
            continue
        since_start += 1
        if isinstance(event, GroupEnd):
            return None
        if isinstance(event, SessionCall | ToolResults | SessionEnd):
            kept.append((record.seq, event))
    return None if start is None else RecordedGroup(start, _sessions(kept), since_start, last_seq)


def _sessions(records: Iterable[tuple[int, SessionCall | ToolResults | SessionEnd]]) -> dict[str, RecordedSession]:
    """Return the sessions of records, by name."""
    found: dict[str, RecordedSession] = {}
    for _, event in records:
        session = found.setdefault(event.session, RecordedSession())
        match event:
            case SessionCall():
                session.calls[event.index] = event
            case ToolResults():
                session.tools[event.index, event.fork] = event
            case SessionEnd():
                session.end = event
    return found
