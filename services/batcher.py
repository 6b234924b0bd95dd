"""The batcher service: joins annotations, forms batches and writes the ledger."""

from lachesis.pipeline.batching.stage import run_batcher
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Write the ledger of the run's trainer."""
    await run_batcher(service, config)
