"""Announces groups that a stage handled again or in vain, so that their traces are kept.

Stamps are not enough: the group may have ended before its stage handled it, an earlier annotation may count, and failed
work leaves no stamp. A lost announcement costs only a trace, so none is stored.
"""

from contextlib import suppress

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.tracing import TraceIncident
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import StageIncident
from lachesis.schemas.errors import SchemaError

__all__ = ["announce_incident", "follow_incidents"]


async def announce_incident(service: Service, group: str, incident: TraceIncident) -> None:
    """Say what happened to a group. A sampled one needs no such word: the stage exports its spans itself."""
    if not service.tracing.on or service.tracing.sampled(group):
        return
    event = StageIncident(
        run=service.run, group=group, stamp=incident.stamp, error_type=incident.error_type, error=incident.error
    )
    with suppress(InfrastructureError):  # the group is handled all the same
        await service.bus.broadcast(subjects.incident(service.run), encode(event))


async def follow_incidents(service: Service) -> None:
    """Report incidents to the service's traces until cancelled; return at once if no traces are exported."""
    if not service.tracing.on:
        return
    async with service.bus.listen(subjects.incident(service.run)) as messages:
        async for message in messages:
            with suppress(SchemaError):  # of another build: it costs a trace
                event = decode(StageIncident, message.data)
                service.tracing.record_incident(event.group, TraceIncident(event.stamp, event.error_type, event.error))
