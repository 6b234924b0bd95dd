"""The gateway service: publishes what environments of the Atropos trajectory API send over HTTP."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.gateway.stage import run_gateway
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Serve every environment of the run whose kind is gateway."""
    await run_gateway(service, config)
