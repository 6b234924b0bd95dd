"""A cluster whose nodes reach one another through proxies, so that one can be cut off while clients still reach it."""

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from integration.cluster.nodes import Cluster
from integration.proxy import Proxy, open_proxy

__all__ = ["SplitCluster", "open_split_cluster"]


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


@asynccontextmanager
async def open_split_cluster(folder: Path, size: int = 3) -> AsyncIterator[SplitCluster]:
    """Run a cluster whose nodes can be cut off from one another, while the context is open."""
    cluster = SplitCluster(folder, size)
    async with AsyncExitStack() as stack:
        for one in cluster.names:
            for other in cluster.names:
                if one != other:
                    cluster.links[one, other] = await stack.enter_async_context(open_proxy(cluster.routes[other]))
        with cluster:
            yield cluster
