"""Redeliveries: the stage that handles a group again says so, and whoever ends the group keeps its trace.

Stamps alone do not do: the group may have ended before its stage came to it, or an earlier annotation counts. What is
lost on the way costs a trace and nothing else, so nothing of it is stored.
"""

from contextlib import suppress

from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Stamp
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import Redelivery
from lachesis.schemas.errors import InfrastructureError, SchemaError

__all__ = ["announce_redelivery", "follow_redeliveries"]


async def announce_redelivery(service: Service, group: str, stamp: Stamp) -> None:
    """Say that the stage has handled `group`, which was delivered to it before. A sampled group needs no such word."""
    if not service.tracing.on or service.tracing.sampled(group):
        return
    event = Redelivery(run=service.run, group=group, stamp=stamp)
    with suppress(InfrastructureError):  # the group is handled all the same
        await service.bus.broadcast(subjects.redelivery(service.run), encode(event))


async def follow_redeliveries(service: Service) -> None:
    """Tell the service's traces of redeliveries until cancelled; at once done where no traces are exported."""
    if not service.tracing.on:
        return
    async with service.bus.listen(subjects.redelivery(service.run)) as messages:
        async for message in messages:
            with suppress(SchemaError):  # of another build: it costs a trace
                event = decode(Redelivery, message.data)
                service.tracing.redelivered(event.group, event.stamp)
