"""Stores the records of a group under way, each before the next step of its conversation.

Guarantees that `store` returns only once the record is stored, and only while no other process has taken the group up:
what depends on it may be handed out. So a process that was stopped at any line hands out nothing that the one which has
replaced it does not know:

* before a record: its lease has run out, which the look before it finds;
* between that look and the answer of the server: the look behind finds it, and the record counts for nothing, since it
  lies behind what the other process goes on from, or is of a life that was replaced;
* behind the second look: the record was stored while the lease was held, so the governor has read it before it lets
  anybody take the group up;
* before its start is stored: the group is promised to one process for a while; a start that comes later is given up.

After the last record no other process goes on with the group. Stopped between the look before that and its storing, a
process ends a group that another one works on: the work goes on, and only a kill of that one would lose it. A record
that does not fit into a message ends the recording: the group goes on, and a kill loses it.
"""

import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Literal

from lachesis.pipeline.calls.left_group_request import Reservation
from lachesis.pipeline.calls.recorded import RecordedGroup
from lachesis.pipeline.errors import GroupTakenError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.recorder import traced
from lachesis.schemas import subjects
from lachesis.schemas.calls import (
    CALL_HEADER,
    CallKey,
    GroupEnd,
    GroupStart,
    RecordKind,
    SessionCall,
    SessionEnd,
    ToolResults,
)
from lachesis.schemas.codec import Event, encode

__all__ = ["CallRecorder", "end_group"]

log = logging.getLogger("lachesis")

_MAX_RECORD_BYTES = 4 << 20


class CallRecorder:
    """Stores what happens in one group; `known` is all that is stored of it, by this life and those before.

    `is_held`: whether the lease of that name is held still. `reservation`: until when no other process begins with a
    group that is taken up.
    """

    def __init__(
        self,
        service: Service,
        start: GroupStart,
        known: RecordedGroup | None = None,
        *,
        is_held: Callable[[str], Awaitable[bool]],
        reservation: Reservation | None = None,
    ) -> None:
        self.known = RecordedGroup(start, {} if known is None else known.sessions)
        self._service = service
        self._subject = subjects.call(start.run, start.env)
        self._ids = secrets.token_hex(8)
        self._stored = 0
        self._is_on = True
        self._is_held = is_held
        self._is_taken = False
        self._reservation = reservation

    @property
    def group(self) -> str:
        return self.known.start.group

    @property
    def life(self) -> int:
        return self.known.start.life

    @property
    def is_taken_up(self) -> bool:
        """Whether the group was begun by another life."""
        return self.known.start.known_seq > 0

    async def begin(self) -> None:
        """Store the start, which makes the group this process's.

        Raises `GroupTakenError` if that took so long that another one may have begun with it.
        """
        start = self.known.start
        await self._put("start", start, CallKey("start", start.group, start.holder, start.life, start.lease))
        if self._reservation is not None and self._reservation.is_over:
            self._is_taken = True
        await self.check_held()

    async def store(self, record: SessionCall | ToolResults | SessionEnd) -> None:
        """Store a record; waits for the server, and for room in the stream.

        Raises `InfrastructureError` when the service drains before it is stored, and `GroupTakenError` if another
        process may have taken the group up by then: it does not know of this record, which counts for nothing.
        """
        await self.check_held()
        if not self._is_on:
            return
        kind: RecordKind
        match record:
            case SessionCall():
                kind = "call"
            case ToolResults():
                kind = "tools"
            case SessionEnd():
                kind = "session"
        data = encode(record)
        if len(data) > _MAX_RECORD_BYTES:
            reason = f"a record of kind {kind} has {len(data)} bytes, of {_MAX_RECORD_BYTES} that fit into a message"
            log.warning("group %s is not recorded any further: %s", self.group, reason)
            await self.end("abandoned", reason=reason)
            return
        await self._put(kind, record, CallKey(kind, self.group), data)
        await self.check_held()
        session = self.known.session(record.session)
        match record:
            case SessionCall():
                session.calls[record.index] = record
            case ToolResults():
                session.tools[record.index, record.fork] = record
            case SessionEnd():
                session.end = record

    async def end(
        self, outcome: Literal["stored", "abandoned"], *, reason: str | None = None, lost_s: float = 0.0
    ) -> None:
        """Store that no process goes on with the group, unless another one may: its calls may be deleted."""
        if not self._is_on or self._is_taken:
            return
        if outcome == "abandoned":  # one whose rollout is stored is at its end, whichever process works on it
            with suppress(GroupTakenError):
                await self.check_held()
        if not self._is_taken:
            self._is_on = False
            end = GroupEnd(group=self.group, life=self.life, outcome=outcome, reason=reason, lost_s=lost_s)
            await self._put("end", end, CallKey("end", self.group))

    async def check_held(self) -> None:
        """Raise `GroupTakenError` if another process may have taken the group up."""
        lease = self.known.start.lease
        if not self._is_taken and lease is not None:
            self._is_taken = not await self._is_held(lease)
        if self._is_taken:
            raise GroupTakenError(
                f"group {self.group}: its lease has ended while this process was stopped or cut off, so that another "
                "process may go on with it"
            )

    async def _put(self, kind: str, record: Event, key: CallKey, data: bytes | None = None) -> None:
        self._stored += 1
        with traced(f"store {kind}"):
            await self._service.retrying(f"store a {kind} record")(
                self._service.bus.publish,
                self._subject,
                encode(record) if data is None else data,
                msg_id=f"{self.group}/{self._ids}/{self._stored}",
                headers={CALL_HEADER: key.pack()},
            )


async def end_group(service: Service, env: str, group: str, life: int, reason: str, *, lost_s: float = 0.0) -> None:
    """Store the end of a group that this process does not take up, so that it is not offered again."""
    end = GroupEnd(group=group, life=life, outcome="abandoned", reason=reason[:500], lost_s=lost_s)
    await service.retrying("store the end of a group")(
        service.bus.publish,
        subjects.call(service.run, env),
        encode(end),
        msg_id=f"{group}/{life}/end",
        headers={CALL_HEADER: CallKey("end", group).pack()},
    )
