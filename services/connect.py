"""Finding a run's server: the configured one, or the embedded one of the run's folder."""

from lachesis.pipeline.bus.connection import connect, for_identity
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.schemas.errors import StartupError

__all__ = ["NATS_FOLDER", "connect_run"]

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
