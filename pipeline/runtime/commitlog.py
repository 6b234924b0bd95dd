"""Writes and reads the commit log of a stateful stage.

Each commit holds outputs, the state change and input cursors in one fenced message.

A commit is a message on the stage's own output subject, stored only when the subject's last sequence is the one this
writer knows; so of two writers one is refused (`FencedError`), and a crash leaves either all of a commit or nothing.
Once the commits since the last one weigh enough (`is_snapshot_due`), the whole state goes to the LEDGER stream, naming
the commit it covers. A start reads the last snapshot and the commits after it. Messages between them that are not the
next commit (garbage, an old commit repeated) are skipped. If a commit is gone, the start is refused, unless a recovery
noted that LEDGER lost newer snapshots: the commits that these covered may be trimmed.
"""

import hashlib
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.last_event import decode_owned
from lachesis.pipeline.bus.skipped_messages import read_noted, read_skipped
from lachesis.pipeline.errors import HistoryLostError, LedgerError
from lachesis.pipeline.runtime.state import RESTORE_HINT, StateStore
from lachesis.pipeline.runtime.stream_marks import MAX_LOST, StreamMarks, has_lost_after, is_known_lost, recovery_hint
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, StreamMark
from lachesis.schemas.codec import Event, encode
from lachesis.schemas.control import StateSnapshot
from lachesis.schemas.errors import DataError

__all__ = ["CommitLog", "RestoredState", "is_snapshot_due"]

log = logging.getLogger("lachesis")

SNAPSHOT_EVERY = 64
"""Least number of commits between two snapshots of the state."""
MAX_COMMITS_SINCE_SNAPSHOT = 4096
"""Most of them, however little they weigh."""
MAX_BYTES_SINCE_SNAPSHOT = 16 << 20
"""What commits weigh, bytes, that need be no more for a snapshot, however large the state is."""

E = TypeVar("E", bound=Event)


def is_snapshot_due(commits: int, weight: int, state: int) -> bool:
    """Return whether a snapshot is due.

    `commits` commits of `weight` bytes in all follow a snapshot of `state` bytes.

    They have to weigh a quarter of the state, so that snapshots store at most four times what commits do. A start is
    bounded all the same: it reads `SNAPSHOT_EVERY` commits, or what weighs min(state / 4, `MAX_BYTES_SINCE_SNAPSHOT`)
    and one commit more, whichever is more, and never more than `MAX_COMMITS_SINCE_SNAPSHOT`.
    """
    enough = min(state // 4, MAX_BYTES_SINCE_SNAPSHOT)
    return commits >= SNAPSHOT_EVERY and (weight >= enough or commits >= MAX_COMMITS_SINCE_SNAPSHOT)


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a start found: the state of the last snapshot (None: none), the deltas after it, the cursors, and the newest
    message that earlier writers had read of each stream. `has_gap`: deltas between state and `deltas` are lost."""

    state: bytes | None
    deltas: list[bytes]
    cursors: dict[str, int]
    read: dict[str, StreamMark] = field(default_factory=dict)
    has_gap: bool = False


class CommitLog(Generic[E]):
    """One writer's view of one output subject. Use `open`."""

    def __init__(self, bus: Bus, states: StateStore, *, stream: str, subject: str, stage: str, term: str) -> None:
        self._bus = bus
        self._states = states
        self._stream = stream
        self._subject = subject
        self._stage = stage
        self._term = term
        self._last = 0
        self.index = 0
        self.appended_bytes = 0
        """Size of the last commit."""
        self.since_snapshot = 0
        self.marks = StreamMarks()
        """The newest message read of each stream; the owner records what it reads."""
        self._weight = 0  # of the commits since then, bytes
        self._state = 0  # what the state weighed then, bytes

    @classmethod
    async def open(
        cls,
        bus: Bus,
        kind: type[E],
        commit_of: Callable[[E], Commit],
        *,
        subject: str,
        state_subject: str,
        stage: str,
        term: str,
        stream: str = subjects.EVENTS,
    ) -> tuple[Self, RestoredState]:
        """Return the log, ready to append, and what its earlier writers left.

        Raises `LedgerError` when a commit that the state needs is gone, `HistoryLostError` when the broker forgot some.
        """
        noted, left_out = await read_noted(bus), await read_skipped(bus)
        states, snapshot = await StateStore.open(bus, state_subject, stage, term)
        log = cls(bus, states, stream=stream, subject=subject, stage=stage, term=term)
        state, cursors, read = None, {}, {}
        if snapshot is not None:
            state, cursors, log._state = snapshot.state, dict(snapshot.cursors), len(snapshot.state)
            read = snapshot.read
            log._last, log.index = snapshot.covers, snapshot.index + 1
        deltas: list[bytes] = []
        has_gap, noted_commits = False, 0
        last = await bus.last(stream, subject)
        end = last.seq if last else 0
        if log._last > end:
            run = subjects.run_of(subject)
            if log._last > (await bus.usage(stream)).last + MAX_LOST:
                raise LedgerError(
                    f"{subject}: the newest snapshot covers commit {log.index - 1} at sequence {log._last} of "
                    f"{stream}, which never held so many messages. {recovery_hint(run)}"
                )
            if not await is_known_lost(bus, run, stream, log._last):
                raise HistoryLostError(
                    f"{subject}: ends at sequence {end}, before commit {log.index - 1} at {log._last}, which a "
                    f"snapshot covers: the broker lost history. {recovery_hint(run)}"
                )
            log._last = end  # the state is as of the lost commit
        elif last and end > log._last:
            async with bus.read(stream, [subject], start=log._last + 1, follow=False) as messages:
                async for message in messages:
                    event = await decode_owned(
                        bus,
                        kind,
                        message,
                        lambda event: commit_of(event).index >= log.index,
                        newer="refuse",
                        left_out=left_out,
                    )
                    log._last = message.seq
                    if event is None:
                        noted_commits += message.seq in noted.get(stream, ())
                        continue
                    commit = commit_of(event)
                    if commit.index != log.index:
                        run = subjects.run_of(subject)
                        is_gap_known = states.is_newest_left_out or await has_lost_after(
                            bus, run, subjects.LEDGER, states.snapshot_seq
                        )
                        if deltas or not is_gap_known:
                            raise LedgerError(
                                f"{subject}: commit {commit.index} at sequence {message.seq} where {log.index} "
                                f"follows: commits are gone from the stream. {recovery_hint(run)}"
                            )
                        has_gap = True
                    if zlib.crc32(commit.delta) != commit.crc32:
                        raise LedgerError(
                            f"{subject}: the change of state in commit {commit.index} at sequence {message.seq} is not "
                            f"what was stored. {RESTORE_HINT}"
                        )
                    deltas.append(commit.delta)
                    log._weight += len(message.data)
                    cursors, read = dict(commit.cursors), commit.read
                    log.index = commit.index + 1
        if noted_commits:
            _warn_of_noted(subject, noted_commits)
        log.since_snapshot = len(deltas)
        log.marks = StreamMarks(read)
        return log, RestoredState(state, deltas, cursors, log.marks.newest, has_gap)

    def next_commit(self, cursors: dict[str, int], delta: bytes) -> Commit:
        """Return the commit to put into the next event."""
        crc32, read = zlib.crc32(delta), self.marks.newest
        return Commit(term=self._term, index=self.index, cursors=cursors, delta=delta, read=read, crc32=crc32)

    async def append(self, event: E) -> int:
        """Store the next event and return its sequence.

        Raises `FencedError` when another writer has taken over.
        """
        msg_id = commit_id(f"commit.{self._subject}.{self._term}.{self.index}")
        data = encode(event)
        self._last = await self._bus.commit(self._subject, data, expected=self._last, msg_id=msg_id)
        self.appended_bytes = len(data)
        self.index += 1
        self.since_snapshot += 1
        self._weight += len(data)
        return self._last

    @property
    def snapshot_due(self) -> bool:
        """Whether so much followed the last snapshot that the next one is worth its room.

        See `is_snapshot_due`.
        """
        return is_snapshot_due(self.since_snapshot, self._weight, self._state)

    async def snapshot(self, cursors: dict[str, int], state: bytes) -> None:
        """Store the whole state as of the last commit. Raises `FencedError`.

        A state too large to be stored at all is left out: a start then reads the commits since the last snapshot.
        """
        event = StateSnapshot(
            stage=self._stage,
            index=self.index - 1,
            covers=self._last,
            cursors=cursors,
            state=state,
            sha256=hashlib.sha256(state).digest(),
            read=self.marks.newest,
        )
        try:
            await self._states.write(event)
        except DataError as error:
            log.warning("no snapshot, so the next start takes longer: %s", error)
        self.since_snapshot, self._weight, self._state = 0, 0, len(state)


def _warn_of_noted(subject: str, commits: int) -> None:
    log.warning("%s: %d commits are passed over, as a recovery of the run noted", subject, commits)
