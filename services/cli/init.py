"""`lachesis init`: the run's streams and its bucket, created or changed in place."""

import anyio

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.cli.options import Options, with_options
from lachesis.services.run.connect import connect_run
from lachesis.services.run.store import make_streams

__all__ = ["init"]


@with_options
def init(options: Options) -> None:
    """Create the run's streams and bucket on the server, or change them to fit the configuration.

    Safe to repeat.
    """
    anyio.run(_init, options.config())


async def _init(config: RunConfig) -> None:
    async with await connect_run(config, f"{config.run}.init", OPERATOR) as bus:
        done = await make_streams(bus, config)
    for line in done:
        print(line)
    where = f"on {without_secrets(config.nats.url)}" if config.nats else f"in {config.path}"
    print(
        f"{'done' if done else 'nothing to do'}: the streams of run {config.run} {where} are as the configuration says"
    )
