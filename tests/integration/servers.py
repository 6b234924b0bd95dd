"""The nats-servers under a run that is to be struck: who starts them, how the run finds them, what can be struck.

`Servers` is the seam: the harness, the chaos campaigns and the audit know nothing else of the servers. `Supervised` is
the embedded server that `lachesis up` itself starts; `Standalone` one that outlives the run, reached through a proxy
whose connections can be cut.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
from integration.proxy import Proxy, open_proxy

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.errors import StartupError
from lachesis.services.run.connect import NATS_FOLDER

__all__ = ["RUN", "Servers", "Standalone", "Supervised"]


RUN = "killed"
"""The run that the servers are for."""


class Servers(Protocol):
    """Every context of a run lies inside one of these; all servers are up when it begins (or will be, with the run)."""

    @property
    def supervised(self) -> bool:
        """Whether the run's supervisor starts the servers, so that they end with it."""

    @property
    def arguments(self) -> Sequence[str]:
        """What tells `lachesis` where the servers are."""

    @property
    def proxies(self) -> Sequence[Proxy]:
        """The connections that can be cut; none where nothing lies between services and servers."""

    def pids(self) -> Mapping[str, int]:
        """The server processes that run now, by name: "nats-server", or "nats-1", "nats-2", ..."""

    def during(self, name: str) -> AbstractAsyncContextManager[NatsBus]:
        """A connection that goes through no proxy, while the run is up."""

    def afterwards(self, name: str) -> AbstractAsyncContextManager[NatsBus]:
        """The same, once the run has ended."""


class Supervised:
    """The embedded server of the run in `folder`; its supervisor starts it, restarts it and stops it."""

    supervised = True
    arguments: Sequence[str] = ()
    proxies: Sequence[Proxy] = ()

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pids(self) -> Mapping[str, int]:
        try:
            found = msgspec.json.decode((self._folder / "pids.json").read_bytes(), type=dict[str, int | None])
        except FileNotFoundError:
            return {}
        pid = found.get("nats-server")
        return {"nats-server": pid} if pid else {}

    @asynccontextmanager
    async def during(self, name: str) -> AsyncIterator[NatsBus]:
        with anyio.fail_after(60):
            while (bus := await self._attempt(name)) is None:  # noqa: ASYNC110
                await anyio.sleep(0.05)  # the supervisor offers nothing to wait on
        async with bus:
            yield bus

    async def _attempt(self, name: str) -> NatsBus | None:
        try:
            endpoint = read_endpoint(self._folder / NATS_FOLDER)
            return await connect(endpoint.url, run=RUN, name=name, token=endpoint.token)
        except StartupError:
            return None  # it starts just now

    @asynccontextmanager
    async def afterwards(self, name: str) -> AsyncIterator[NatsBus]:
        async with (
            EmbeddedServer(self._folder / NATS_FOLDER) as server,
            await connect(server.url, run=RUN, name=name, token=server.token) as bus,
        ):
            yield bus


class Standalone:
    """A server beside the run, with its store in `folder`, behind a proxy. A context; a server that dies comes back."""

    supervised = False

    def __init__(self, server: EmbeddedServer, proxy: Proxy) -> None:
        self.server = server
        self.proxies: Sequence[Proxy] = (proxy,)
        token = server.store / "token"
        token.write_text(server.token)
        self.arguments: Sequence[str] = (
            "--nats",
            f"nats://127.0.0.1:{proxy.port}",
            "--set",
            f"nats.token_file={token}",
        )

    @classmethod
    @asynccontextmanager
    async def run(cls, folder: Path) -> AsyncIterator["Standalone"]:
        async with EmbeddedServer(folder / "server", ServerConfig(max_file_bytes=32 << 30)) as server:
            port = int(server.url.rpartition(":")[2])
            async with open_proxy(port) as proxy, anyio.create_task_group() as tasks:
                tasks.start_soon(_keep, server)
                yield cls(server, proxy)
                tasks.cancel_scope.cancel()

    def pids(self) -> Mapping[str, int]:
        try:
            return {"nats-server": self.server.pid}
        except StartupError:
            return {}  # between two lives

    @asynccontextmanager
    async def during(self, name: str) -> AsyncIterator[NatsBus]:
        async with await connect(self.server.url, run=RUN, name=name, token=self.server.token) as bus:
            yield bus

    afterwards = during


async def _keep(server: EmbeddedServer) -> None:
    while True:
        await server.wait()
        await server.start_again()
