"""Measuring the streams, and agreeing with the other runs on the server on who may promise what is left (`sharing`).

The record of reservations is read first, the streams are measured then, and the new record is stored only if nobody
wrote in between. Until that is certain the run promises no more than both the old and the new one allow.
"""

import time

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.store_room import KEEP_FREE_BYTES
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.disk import room_at
from lachesis.pipeline.flow import sharing
from lachesis.pipeline.flow.logic import Governor
from lachesis.pipeline.stage.service import Service
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import FencedError
from lachesis.schemas.retention import Reservations
from lachesis.schemas.subjects import BUCKETS, EVENTS, LEDGER, RESERVATIONS, ROLLOUTS, TEACHER

__all__ = ["Measure"]

_BUCKET = BUCKETS["retention"]


class Measure:
    """The measuring of one governor's life."""

    def __init__(self, service: Service, config: RunConfig, governor: Governor) -> None:
        self._service = service
        self._bus = service.bus
        self._flow = config.flow
        self._store = config.store
        self._governor = governor
        self._has_taken_over = False

    async def take(self) -> None:
        """Tell the governor what the streams hold and what it may promise of them.

        Raises `FencedError` when a later governor of the run reserves, `SchemaError` where the record is broken.
        """
        budget = self._governor.budget
        while True:
            entry = await self._bus.value(_BUCKET, RESERVATIONS)
            old = decode(Reservations, entry.value) if entry else Reservations()
            asked_s = time.monotonic()
            usage = await self._usage()
            now_ns = await self._bus.server_time_ns()
            new = sharing.reserve(
                old,
                self._service.run,
                self._service.instance,
                budget.demand(),
                usage,
                now_ns=now_ns,
                lasts_s=self._flow.lease_s + self._flow.reservation_s,
                close_at=self._flow.close_at,
                keeps=self._governor.waits,
                takes_over=not self._has_taken_over,
            )
            share = sharing.share_of(new, self._service.run)
            if new is not old:
                budget.narrow(share)
                try:
                    await self._bus.put(_BUCKET, RESERVATIONS, encode(new), revision=entry.revision if entry else 0)
                except FencedError:
                    continue  # somebody else wrote: all may be different now
            self._has_taken_over = True
            budget.disk_bytes = self._disk_bytes()
            self._governor.usage(usage, asked_s, share)
            self._governor.contact(time.monotonic())
            return

    def _disk_bytes(self) -> int | None:
        if self._store is None or not (room := room_at(self._store)).total_bytes:
            return None
        return max(0, room.free_bytes - KEEP_FREE_BYTES)

    async def _usage(self) -> dict[str, StreamUsage]:
        return {name: await self._bus.usage(name) for name in (ROLLOUTS, EVENTS, TEACHER, LEDGER)}
