"""The teacher service: adds a second model's logprobs to rollouts."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.teacher.stage import run_teacher

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run one replica."""
    await run_teacher(service, config)
