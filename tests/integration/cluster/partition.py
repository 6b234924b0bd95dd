"""A cluster whose nodes reach one another through proxies, so that one can be cut off while clients still reach it."""

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from integration.cluster.nodes import Cluster
from integration.harness import CONFIG, RUN, SUMS
from integration.proxy import Proxy, open_proxy
from integration.security.secured import auth_init, make_certificates

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect, for_identity

__all__ = ["SecuredCluster", "SplitCluster", "open_split_cluster"]


class SplitCluster(Cluster):
    """`links` has the proxy between every two nodes, by the one that connects and the one that listens.

    Nodes tell one another an address that leads nowhere, so no connection goes around the proxies.
    """

    def __init__(self, folder: Path, size: int = 3) -> None:
        super().__init__(folder, size)
        self.links: dict[tuple[str, str], Proxy] = {}

    def config_of(self, name: str) -> Path:
        """Write the node's own configuration: the same files, with its own routes."""
        folder = self.folder / f"{name}.conf"
        folder.mkdir(exist_ok=True)
        for file in self.folder.glob("*.conf"):
            if file.is_file():
                shutil.copy(file, folder)
        routes = [
            f'"nats-route://route:secret@127.0.0.1:{link.port}"' for (one, _), link in self.links.items() if one == name
        ]
        (folder / "routes.conf").write_text(
            'authorization { user: "route", password: "secret" }\n'
            f'advertise: "127.0.0.1:1"\nroutes: [{", ".join(routes)}]\n'
        )
        return folder / "cluster.conf"

    async def cut_off(self, name: str, seconds: float) -> None:
        """Let nothing pass between a node and the others for so long; clients reach it as before."""
        async with anyio.create_task_group() as tasks:
            for ends, link in self.links.items():
                if name in ends:
                    tasks.start_soon(link.silence, seconds)


class SecuredCluster(SplitCluster):
    """Clients have TLS and the keys that `lachesis auth init` makes for the run `RUN` of the harness."""

    def write_auth(self) -> None:
        make_certificates(self.folder)
        tls = ("--cert", str(self.folder / "server.pem"), "--key", str(self.folder / "server.key"))
        auth_init(self.folder, *tls, "--run", RUN, config=CONFIG.format(sums=SUMS, steps=1))
        tls_conf = self.folder / "tls.conf"
        tls_conf.write_text(tls_conf.read_text().replace("tls {", "tls {\n  timeout: 30", 1))

    def config_of(self, name: str) -> Path:
        config = super().config_of(name)
        (config.parent / "auth").mkdir(exist_ok=True)
        shutil.copy(self.folder / "auth" / f"{RUN}.conf", config.parent / "auth")
        return config

    @property
    def url(self) -> str:
        return super().url.replace("nats://", "tls://")

    @property
    def arguments(self) -> Sequence[str]:
        sets = {"nats.nkey_folder": self.folder / "auth" / RUN, "nats.ca_file": self._ca_file, "streams.replicas": "3"}
        return ("--nats", self.url, *(f"--set={key}={value}" for key, value in sets.items()))

    @property
    def _ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    def connect(self, name: str, run: str = RUN, **config: Any) -> Any:
        keys = str(self.folder / "auth" / RUN)
        settings = {"url": self.url, "ca_file": self._ca_file, "nkey_folder": keys, "connect_timeout_s": 60.0}
        return connect(run=run, name=name, config=for_identity(ConnectionConfig(**settings | config), OPERATOR))


@asynccontextmanager
async def open_split_cluster(folder: Path, size: int = 3, *, secured: bool = False) -> AsyncIterator[SplitCluster]:
    """Run a cluster whose nodes can be cut off from one another, while the context is open."""
    cluster = SecuredCluster(folder, size) if secured else SplitCluster(folder, size)
    async with AsyncExitStack() as stack:
        for one in cluster.names:
            for other in cluster.names:
                if one != other:
                    cluster.links[one, other] = await stack.enter_async_context(open_proxy(cluster.routes[other]))
        with cluster:
            yield cluster
