"""Requests a group that another life has left behind, with its records, from the governor.

The group is promised to this process for a while, in which its start or end has to be stored. What comes later, from a
process that was stopped meanwhile, counts for nothing.
"""

import time
from typing import NamedTuple

from lachesis.pipeline.calls.open_groups import RESERVATION_S
from lachesis.pipeline.calls.recorded import RecordedGroup, fold_records
from lachesis.pipeline.common.boottime import SURE_SHARE, boottime_s
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.calls import StoredRecord, TakeUpReply, TakeUpRequest
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError

__all__ = ["LeftGroup", "Reservation", "request_left_group"]

_ASK_TIMEOUT_S = 10.0


class Reservation(NamedTuple):
    """No other process begins with a group that this one requested at Unix time `asked_ns`, until `until_s`.

    That is by the clock that goes on while the machine sleeps.
    """

    asked_ns: int
    until_s: float

    @classmethod
    def from_now(cls) -> "Reservation":
        return cls(time.time_ns(), boottime_s() + SURE_SHARE * RESERVATION_S)

    @property
    def is_over(self) -> bool:
        return boottime_s() >= self.until_s


class LeftGroup(NamedTuple):
    """A group that was left behind. `recorded` None: it cannot be gone on with, for `reason`."""

    group: str
    recorded: RecordedGroup | None
    reservation: Reservation
    reason: str = ""


async def request_left_group(service: Service, env: str, holder: str, life: int) -> LeftGroup | None:
    """Return a group of `env` for this process to go on with; None: none is left behind.

    It is offered to no other process for half a minute, in which the caller stores a start or an end of it. Waits for
    the governor. Raises `InfrastructureError` when the service drains before it answers.
    """
    request = TakeUpRequest(env=env, holder=holder, life=life)
    records: list[StoredRecord] = []
    reservation: Reservation | None = None
    while True:
        asked = service.retrying("take up a group that was left behind")
        found: tuple[Reservation, TakeUpReply] = await asked(_request, service, request)
        reservation, reply = reservation or found[0], found[1]
        if reply.group is None:
            return None
        records += reply.records
        if not reply.more or not reply.records:
            break
        request = request.replace(group=reply.group, after=reply.records[-1].seq)
    try:
        recorded = fold_records(records)
    except SchemaError as error:
        return LeftGroup(reply.group, None, reservation, f"its records cannot be read: {error}")
    return LeftGroup(reply.group, recorded, reservation, "" if recorded else "its records hold no start, or its end")


async def _request(service: Service, request: TakeUpRequest) -> tuple[Reservation, TakeUpReply]:
    subject, reservation = subjects.take_up(service.run, request.env), Reservation.from_now()
    data = await service.bus.request(subject, encode(request), timeout_s=_ASK_TIMEOUT_S)
    return reservation, decode(TakeUpReply, data)
