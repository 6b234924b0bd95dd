"""What commands that follow a run do at its end: say so, and end as well."""

import sys

import anyio

from lachesis.pipeline.config.run import RunConfig
from lachesis.services.connect import until_ended

__all__ = ["end_with_run", "tell_ended"]


def tell_ended(run: str) -> None:
    """Say, beside the output, why nothing more will come."""
    print(f"lachesis: run {run} has ended; this is what there is of it", file=sys.stderr)


async def end_with_run(config: RunConfig, scope: anyio.CancelScope) -> None:
    """Cancel once the run has ended, and say so."""
    await until_ended(config)
    print(f"lachesis: run {config.run} has ended", file=sys.stderr)
    scope.cancel()
