"""The curriculum service: learns from outcomes which tasks to draw next."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.curriculum.stage import run_curriculum
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run the single writer of every environment's curriculum."""
    await run_curriculum(service, config)
