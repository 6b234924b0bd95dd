"""The inference service: a reference server for one role (policy, teacher or eval)."""

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.inference.stage import run_inference
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Serve the role `part`, policy if it is empty."""
    await run_inference(service, config, part or "policy")
