"""The evaluator service: evaluates policy versions on held-out tasks."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments.evaluator import run_evaluator
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run the run's evaluator."""
    await run_evaluator(service, config)
