"""Where the inference servers of a run are: each registers its URL under (run, role), whoever needs one looks it up.

Guarantees that a client made by `open_role` follows a server that moved: a call that fails for infrastructure reasons
is answered by the next look-up, so callers only retry.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

import anyio
import httpx

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.background import background
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.schemas import subjects
from lachesis.schemas.errors import ConfigError

__all__ = ["Directory", "open_role", "register"]

log = logging.getLogger("lachesis")

_BUCKET = subjects.BUCKETS["inference"]


def _key(run: str, role: str) -> str:
    return f"{run}.{role}"


async def register(bus: Bus, run: str, role: str, url: str) -> None:
    """Say that the server of `role` answers at `url`."""
    await bus.put(_BUCKET, _key(run, role), url.encode())


class Directory:
    """Hands out a client for the server's present URL; `current` waits for a server to register.

    A context that closes the clients it handed out.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._clients = AsyncExitStack()
        self._client: InferenceClient | None = None
        self._changed = anyio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._clients.aclose()

    async def current(self) -> InferenceClient:
        """Return the client of the server that registered last, waiting until one has."""
        while self._client is None:
            await self._changed.wait()
        return self._client

    async def follow(self, bus: Bus, run: str, role: str) -> None:
        """Keep `current` true to the register. Runs until cancelled."""
        async with bus.watch(_BUCKET, _key(run, role)) as entries:
            async for entry in entries:
                try:
                    await self.use(entry.value.decode())
                except (ConfigError, UnicodeDecodeError) as error:  # whoever wrote it, the next server registers anew
                    log.warning("the register of inference servers holds no URL: %s", str(error)[:200])

    async def use(self, url: str) -> None:
        """Hand out clients for `url` from now on. Raises `ConfigError` when it is none."""
        _check_url(url)
        if self._client is not None and self._client.config.url == url:
            return
        # The old client stays open: requests may be under way on it.
        client = InferenceClient(ClientConfig(url=url, timeout=self._timeout_s))
        self._client = await self._clients.enter_async_context(client)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def _check_url(url: str) -> None:
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"inference server {url[:200]!r} is no URL: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.host:
        raise ConfigError(f"inference server {url[:200]!r}: use http://HOST:PORT")


@asynccontextmanager
async def open_role(
    bus: Bus, run: str, role: str, *, url: str | None = None, timeout_s: float = 120.0
) -> AsyncIterator[Directory]:
    """Yield the directory of one role: of the server at `url`, or of whichever registers on the bus."""
    async with Directory(timeout_s) as directory, background() as tasks:
        if url is not None:
            await directory.use(url)
        else:
            tasks.start_soon(directory.follow, bus, run, role)
        yield directory
