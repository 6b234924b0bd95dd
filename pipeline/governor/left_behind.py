"""Answers which group under way a process may take up, and with which records.

Guarantees that a group is given to one process at a time, to no other one while its lease is held, and with all records
that were stored while it was: what lies in the log is read to its end before.
"""

from contextlib import aclosing

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.calls import CALL_HEADER, CallKey, RecordKind, StoredRecord, TakeUpReply, TakeUpRequest
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.subjects import CALLS

__all__ = ["LeftBehind"]

_PAGE_BYTES = 1 << 20
_PAGE_RECORDS = 256


class LeftBehind:
    """`catch_up` before anything is answered; then `follow` in a task of its own."""

    def __init__(self, service: Service, governor: Governor) -> None:
        self.groups = OpenGroups(governor.is_leased)
        self._bus = service.bus
        self._subject = subjects.call(service.run)
        self._next = 1

    async def catch_up(self) -> None:
        """Read the headers of what is stored now."""
        await self._read(follow=False)

    async def follow(self) -> None:
        """Read the headers of what is stored from now on."""
        await self._read(follow=True)

    async def _read(self, *, follow: bool) -> None:
        async with self._bus.read(
            CALLS, [self._subject], start=self._next, headers_only=True, follow=follow
        ) as messages:
            async for message in messages:
                if message.seq >= self._next:  # else the other reader has been quicker
                    self._next = message.seq + 1
                    self.groups.apply_message(message)

    def count(self, env: str, now_s: float) -> int:
        """Return how many groups of `env` a process may take up."""
        return self.groups.count_free(env, now_s)

    async def answer(self, env: str, request: TakeUpRequest, now_s: float) -> TakeUpReply:
        """Return a group of `env` that the asking process may take up, or more records of one that it took."""
        group = request.group
        if group is None and self.groups.count_free(env, now_s, request.holder, request.life):
            await self.catch_up()
            group = self.groups.assign(env, request.holder, request.life, now_s)
        if group is None:
            return TakeUpReply()
        seqs = self.groups.records(env, group, request.after)
        records: list[StoredRecord] = []
        size = 0
        try:
            async with aclosing(self._bus.fetch(CALLS, seqs[:_PAGE_RECORDS])) as messages:
                async for message in messages:
                    if records and size + len(message.data) > _PAGE_BYTES:
                        break
                    size += len(message.data)
                    records.append(StoredRecord(seq=message.seq, kind=_kind(message), data=message.data))
        except (NotFoundError, SchemaError):  # trimmed meanwhile: without its start it is no group any more
            return TakeUpReply(group=group)
        return TakeUpReply(group=group, records=records, more=len(records) < len(seqs))


def _kind(message: StoredMessage) -> RecordKind:
    return CallKey.unpack(message.headers.get(CALL_HEADER)).kind
