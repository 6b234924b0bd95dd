"""Finding a run's server: the configured one, or the embedded one of the run's folder."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from lachesis.pipeline.bus.connection import connect, for_identity
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.access import OBSERVER
from lachesis.schemas.errors import StartupError

__all__ = ["NATS_FOLDER", "connect_run", "open_history"]

log = logging.getLogger("lachesis")

NATS_FOLDER = "nats"
"""Where in a run's folder the embedded server keeps its store."""


async def connect_run(config: RunConfig, name: str, identity: str) -> NatsBus:
    """Return the bus, to be used as a context. `name` is shown in the server's own monitoring, `identity` (a service,
    `access.OPERATOR` or `access.OBSERVER`) says whose key is used where the run has keys.

    Raises `StartupError` when there is no server or an unfit one, `AccessError` when it refuses the credentials.
    """
    if config.nats is not None:
        return await connect(name=name, config=for_identity(config.nats, identity))
    try:
        endpoint = read_endpoint(config.path / NATS_FOLDER)
    except StartupError as error:
        raise StartupError(
            f"no server runs in {config.path}: start the run with `lachesis up`, name another run with --run or "
            "--config, or name a server with --nats URL"
        ) from error
    return await connect(endpoint.url, name=name, token=endpoint.token)


@asynccontextmanager
async def open_history(config: RunConfig, name: str, identity: str = OBSERVER) -> AsyncIterator[NatsBus]:
    """Yield a bus to read a run with, and to do with its history what `identity` may.

    A run that has ended and whose server was its own is read from its folder, by a server that lives as long as the
    context. Raises as `connect_run`.
    """
    store = config.path / NATS_FOLDER
    async with AsyncExitStack() as stack:
        try:
            bus = await connect_run(config, name, identity)
        except StartupError:
            if config.nats is not None or not (store / "jetstream").is_dir():
                raise
            log.info("no server runs in %s: reading its history with a server of my own", config.path)
            server = await stack.enter_async_context(EmbeddedServer(store))
            bus = await connect(server.url, name=name, token=server.token)
        yield await stack.enter_async_context(bus)
