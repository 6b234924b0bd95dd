"""The normalizer service: turns scores into normalized rewards and advantages."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.rewards.stage import run_normalizer
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run the single writer of every environment's rewards."""
    await run_normalizer(service, config)
