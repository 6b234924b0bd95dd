"""The environment service: generates rollouts of one environment, or of every one of the run."""

import anyio

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environments.stage import run_environment
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Generate for environment `part`, for all if it is empty."""
    async with anyio.create_task_group() as tasks:
        own = [name for name, env in config.environments.items() if not env.is_foreign]
        for name in [part] if part else own:
            tasks.start_soon(run_environment, service, config, name)
