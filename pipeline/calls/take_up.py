"""Requests a group that another life has left behind, with its records, from the governor."""

from typing import NamedTuple

from lachesis.pipeline.calls.recorded import RecordedGroup, fold_records
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.calls import StoredRecord, TakeUpReply, TakeUpRequest
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError

__all__ = ["LeftGroup", "take_up"]

_ASK_TIMEOUT_S = 10.0


class LeftGroup(NamedTuple):
    """A group that was left behind. `recorded` None: it cannot be gone on with, for `reason`."""

    group: str
    recorded: RecordedGroup | None
    reason: str = ""


async def take_up(service: Service, env: str, holder: str, life: int) -> LeftGroup | None:
    """Return a group of `env` for this process to go on with; None: none is left behind.

    It is offered to no other process for half a minute, in which the caller stores a start or an end of it. Waits for
    the governor. Raises `InfrastructureError` when the service drains before it answers.
    """
    request = TakeUpRequest(env=env, holder=holder, life=life)
    records: list[StoredRecord] = []
    while True:
        reply: TakeUpReply = await service.retrying("take up a group that was left behind")(_request, service, request)
        if reply.group is None:
            return None
        records += reply.records
        if not reply.more or not reply.records:
            break
        request = request.replace(group=reply.group, after=reply.records[-1].seq)
    try:
        recorded = fold_records(records)
    except SchemaError as error:
        return LeftGroup(reply.group, None, f"its records cannot be read: {error}")
    return LeftGroup(reply.group, recorded, "" if recorded else "its records hold no start, or its end")


async def _request(service: Service, request: TakeUpRequest) -> TakeUpReply:
    subject = subjects.take_up(service.run, request.env)
    return decode(TakeUpReply, await service.bus.request(subject, encode(request), timeout_s=_ASK_TIMEOUT_S))
