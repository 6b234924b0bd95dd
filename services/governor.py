"""The governor service: grants leases, so that nothing is generated that cannot be used."""

from lachesis.pipeline.config.budgets import check_budgets
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.flow.stage import run_governor
from lachesis.pipeline.stage.service import Service

__all__ = ["main"]


async def main(service: Service, config: RunConfig, part: str) -> None:
    """Run the run's governor."""
    check_budgets(config)
    await run_governor(service, config)
