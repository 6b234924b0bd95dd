"""The NATS micro protocol: every service answers `nats micro ls|info|stats|ping` and a `health` request."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import nats.micro
from nats.micro.request import Request

from lachesis import __version__
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects

__all__ = ["micro_service"]


@asynccontextmanager
async def micro_service(bus: NatsBus, service: Service, about: str) -> AsyncIterator[None]:
    """Answer for `service` while the context is open. Health is JSON: its state, counters and metrics."""

    async def health(request: Request) -> None:
        report = service.vitals.report()
        body = {"state": report.state, "note": report.note, "handled": report.handled, "lag": report.lag}
        await request.respond(msgspec.json.encode({**body, "metrics": service.vitals.metrics}))

    metadata = {"run": service.run, "revision": service.revision, "instance": service.instance}
    micro = await nats.micro.add_service(
        bus.client, name=subjects.micro_name(service.name), version=__version__, description=about, metadata=metadata
    )
    try:
        await micro.add_endpoint(name="health", handler=health, subject=subjects.health(service.run, service.name))
        yield
    finally:
        if bus.client.is_connected:
            await micro.stop()
