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
    group: RecordedGroup | None = None
    for record in records:
        event = decode(_KINDS[record.kind], record.data)
        if isinstance(event, GroupStart):
            if group is not None and event.life < group.start.life:
                continue
            sessions = {} if group is None else group.sessions
            group = RecordedGroup(event, sessions)
            continue
        if group is None:
            raise SchemaError(f"a record of kind {record.kind} at sequence {record.seq} has no start before it")
        if getattr(event, "life", 0) < group.start.life:
            continue
        group.since_start += 1
        match event:
            case SessionCall():
                group.session(event.session).calls[event.index] = event
            case ToolResults():
                group.session(event.session).tools[event.index, event.fork] = event
            case SessionEnd():
                group.session(event.session).end = event
            case GroupEnd():
                return None
    return group
