"""The health service: looks for what is wrong in the event streams, and stops what must not go on."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.health.stage import run_health
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run the single writer of every environment's alerts."""
    await run_health(service, config)
