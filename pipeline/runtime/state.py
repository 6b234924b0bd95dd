"""Stores the state of a stateful stage: one snapshot on its subject, in parts if it is too large.

Parts lie on subjects beside the snapshot's, in two alternating sets: parts that the current snapshot lists are never
overwritten, so a writer that dies between two parts leaves the old state whole. The snapshot is stored last and names
the content of its parts. Each part is fenced as the snapshot is: of two writers one is refused, whatever it was about
to write. Room is bounded: two states, the last message of each subject, which trimming leaves.
"""

import hashlib
from typing import Self

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.commit_ids import commit_id
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.skipped_messages import read_skipped
from lachesis.pipeline.errors import LedgerError, NotFoundError
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import StatePart, StateSnapshot
from lachesis.schemas.errors import DataError
from lachesis.schemas.subjects import LEDGER

__all__ = ["MAX_STATE_BYTES", "PART_BYTES", "RESTORE_HINT", "StateStore"]

PART_BYTES = 4 << 20
"""Largest state that is stored as one message, and size of the parts of larger ones."""
MAX_STATE_BYTES = 256 << 20
"""Largest state at all; a stage holds it in memory as a whole."""
RESTORE_HINT = (
    "`lachesis runs recover` makes the run go on with the state before it. Or restore its store from a backup, or set "
    "`revision` to a new name: the services then start over with what history is left"
)
"""What to do about a state that cannot be used."""


class StateStore:
    """One writer's view of one stage's state. Use `open`."""

    def __init__(self, bus: Bus, subject: str, stage: str, term: str) -> None:
        self._bus = bus
        self._subject = subject
        self._stage = stage
        self._term = term
        self._last = 0
        self.snapshot_seq = 0
        """Where the snapshot in force is stored; 0: there was none."""
        self.is_newest_left_out = False
        """Whether a newer snapshot than that in force was left out."""
        self._slot = 0  # of the snapshot in force
        self._ends: dict[str, int] = {}  # the last sequence on each part's subject
        self._writing = -1
        self._done: dict[str, int] = {}  # of the state of commit `_writing`: by subject, where its parts lie

    @classmethod
    async def open(cls, bus: Bus, subject: str, stage: str, term: str) -> tuple[Self, StateSnapshot | None]:
        """Return the store, ready to write, and the snapshot in force with its whole state.

        Raises `LedgerError` when a part of it is gone or is not what was stored.
        """
        store = cls(bus, subject, stage, term)
        # before the snapshot is read: a part that somebody writes afterwards is one that this writer does not know
        siblings = f"{subject.rpartition('.')[0]}.*"
        async with bus.read(LEDGER, [siblings], headers_only=True, follow=False) as messages:
            async for message in messages:
                if message.subject.startswith(f"{subject}="):
                    store._ends[message.subject] = message.seq
        snapshot, store.snapshot_seq, store._last = await read_last_event(
            bus, LEDGER, subject, StateSnapshot, lambda one: one.stage == stage, newer="refuse"
        )
        store.is_newest_left_out = store._last in (await read_skipped(bus)).get(LEDGER, ())
        if snapshot is not None and snapshot.parts:
            store._slot = snapshot.slot
            snapshot = snapshot.replace(state=await store._join(snapshot))
        if snapshot is not None and hashlib.sha256(snapshot.state).digest() != snapshot.sha256:
            raise LedgerError(
                f"{subject}: {len(snapshot.state)} bytes that are not the state that was stored (LEDGER, sequence "
                f"{store.snapshot_seq}). {RESTORE_HINT}"
            )
        return store, snapshot

    async def _join(self, snapshot: StateSnapshot) -> bytes:
        """Return the state that a snapshot's parts make up. Raises `LedgerError`."""
        try:
            stored = self._bus.fetch(LEDGER, snapshot.parts)
            data = [decode(StatePart, message.data).data async for message in stored]
        except (NotFoundError, DataError) as error:
            raise LedgerError(f"{self._subject}: a part of the state is gone: {error}. {RESTORE_HINT}") from error
        return b"".join(data)

    async def write(self, event: StateSnapshot) -> None:
        """Store a snapshot, its state in parts if need be. May be repeated with the same after an outage.

        Raises `FencedError` when another writer has taken over, `DataError` for a state that is too large.
        """
        state = event.state
        if len(state) > PART_BYTES:
            if len(state) > MAX_STATE_BYTES:
                raise DataError(f"{self._subject}: a state of {len(state)} bytes where {MAX_STATE_BYTES} may be stored")
            slot = 1 - self._slot
            parts = await self._write_parts(event, slot)
            event = event.replace(state=b"", parts=parts, slot=slot)
        msg_id = commit_id(f"state.{self._subject}.{self._term}.{event.index}")
        self._last = await self._bus.commit(self._subject, encode(event), expected=self._last, msg_id=msg_id)
        if event.parts:
            self._slot = event.slot

    async def _write_parts(self, event: StateSnapshot, slot: int) -> list[int]:
        """Store the parts that are not stored yet and return the sequences of all."""
        if self._writing != event.index:
            self._writing, self._done = event.index, {}
        view = memoryview(event.state)
        for number, offset in enumerate(range(0, len(view), PART_BYTES)):
            subject = f"{self._subject}={slot}={number}"
            msg_id = commit_id(f"state.{subject}.{self._term}.{event.index}")
            if subject in self._done:
                continue
            part = StatePart(stage=self._stage, index=event.index, data=bytes(view[offset : offset + PART_BYTES]))
            expected = self._ends.get(subject, 0)
            seq = await self._bus.commit(subject, encode(part), expected=expected, msg_id=msg_id)
            self._ends[subject] = self._done[subject] = seq
        return list(self._done.values())
