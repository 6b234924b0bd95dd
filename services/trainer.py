"""The trainer service: trains on batches and publishes weights."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.training.stage import run_trainer

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run one replica."""
    await run_trainer(service, config)
