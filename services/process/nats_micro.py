"""The NATS micro protocol: services answer `nats micro ls|info|stats|ping` and `health`."""

from contextlib import suppress

import msgspec
from nats.errors import FlushTimeoutError
from nats.micro.request import Request
from nats.micro.service import Service as MicroService
from nats.micro.service import ServiceConfig

from lachesis import __version__
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.services.process.single_writer import WriterPlace

__all__ = ["join_micro"]


async def join_micro(bus: NatsBus, service: Service, about: str, place: WriterPlace | None = None) -> None:
    """Answer for `service`, which runs at `place`, from now on until the bus is closed.

    Health is JSON: its state, counters and metrics, and where it runs.
    """

    async def health(request: Request) -> None:
        report = service.vitals.report()
        body = {"state": report.state, "note": report.note, "handled": report.handled, "lag": report.lag}
        where = msgspec.structs.asdict(place or WriterPlace())
        about_it = {"instance": service.instance, "revision": service.revision, **where}
        await request.respond(msgspec.json.encode({**body, **about_it, "metrics": service.vitals.metrics}))

    metadata = {"service": service.name, "run": service.run, "revision": service.revision, "instance": service.instance}
    name = subjects.service_name(service.name)
    config = ServiceConfig(name=name, version=__version__, description=about, metadata=metadata)
    micro = MicroService(bus.micro_client, config)
    await micro.add_endpoint(name="health", handler=health, subject=subjects.health(service.run, service.name))
    with suppress(FlushTimeoutError):  # an unavailable server learns of it when it is back
        await micro.start()
