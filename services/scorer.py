"""The scorer service: rates rollouts with an ensemble of raters."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.scoring.stage import run_scorer
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run one replica."""
    await run_scorer(service, config)
