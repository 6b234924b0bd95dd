"""The stages of a run inside this process, on one bus: what `lachesis up` starts as processes.

Each gets a service of its own, with heartbeats, as its process would give it. No stage knows the difference.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio.abc import TaskGroup

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.services.registry import load_stage, services

__all__ = ["STAGES", "open_stages", "run_stage"]

STAGES = ("governor", "scorer", "normalizer", "batcher")
"""What stands between an environment and a trainer, and grants the environment its leases."""


@asynccontextmanager
async def open_stages(bus: Bus, config: RunConfig) -> AsyncIterator[TaskGroup]:
    """Run `STAGES` until the context ends. Yields their task group, for what else is to run beside them."""
    async with background() as tasks:
        for name in STAGES:
            tasks.start_soon(_run_registered, bus, config, name)
        yield tasks


async def _run_registered(bus: Bus, config: RunConfig, name: str) -> None:
    stage = load_stage(services()[name])
    await run_stage(bus, config, name, lambda service: stage(service, config, ""))


async def run_stage(bus: Bus, config: RunConfig, name: str, stage: Callable[[Service], Awaitable[None]]) -> None:
    """Run one stage as the service `name`."""
    async with open_service(bus, name, config.run, config.revision) as service:
        await stage(service)
