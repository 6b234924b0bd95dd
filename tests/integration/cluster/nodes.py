"""Three nats-servers on loopback, started with the files of `deploy/nats/` as any user would, to be killed at will."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
import msgspec
from integration.servers import RUN

from lachesis.pipeline.bus.config import ConnectionConfig, StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import find_binary
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.child_process import die_with_parent
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.subjects import kind_of, stream_name

__all__ = ["Cluster", "leader_of", "make_streams", "settled"]

DEPLOY = Path(__file__).parents[3] / "deploy" / "nats"
TOKEN = "for tests only"


class Cluster:
    """`with Cluster(folder) as cluster:` runs `size` nodes; a killed one comes back with `start(node)`.

    It is one of `integration.servers.Servers`, so a whole run can stand on it.
    """

    supervised = False

    def __init__(self, folder: Path, size: int = 3) -> None:
        self.folder = folder
        self.names = [f"nats-{number}" for number in range(1, size + 1)]
        ports = free_ports(2 * size)
        self.ports = dict(zip(self.names, ports[:size], strict=True))
        self.routes = dict(zip(self.names, ports[size:], strict=True))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.proxies: Sequence[Any] = ()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in DEPLOY.glob("*.conf"):
            shutil.copy(file, self.folder)
        self.write_auth()
        peers = ", ".join(f'"nats-route://route:secret@127.0.0.1:{port}"' for port in self.routes.values())
        (self.folder / "routes.conf").write_text(
            f'authorization {{ user: "route", password: "secret" }}\nroutes: [{peers}]\n'
        )
        for name in self.names:
            self.start(name)
        return self

    def write_auth(self) -> None:
        """Write who may connect."""
        (self.folder / "auth.conf").write_text(f'authorization {{ token: "{TOKEN}" }}\n')
        (self.folder / "token").write_text(TOKEN)

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    @property
    def url(self) -> str:
        return ",".join(f"nats://127.0.0.1:{port}" for port in self.ports.values())

    @property
    def arguments(self) -> Sequence[str]:
        """What tells `lachesis` to use this cluster."""
        sets = {"nats.token_file": str(self.folder / "token"), "streams.replicas": "3"}
        return ("--nats", self.url, *(f"--set={key}={value}" for key, value in sets.items()))

    def pids(self) -> Mapping[str, int]:
        return {name: process.pid for name, process in self.processes.items() if process.poll() is None}

    def config_of(self, name: str) -> Path:
        """Return the configuration of a node."""
        return self.folder / "cluster.conf"

    def start(self, name: str) -> None:
        """Start a node that does not run, with the store it had."""
        environ = {
            "NATS_NODE": name,
            "NATS_LISTEN": f"127.0.0.1:{self.ports[name]}",
            "NATS_CLUSTER_LISTEN": f"127.0.0.1:{self.routes[name]}",
            "NATS_STORE": f'"{self.folder / name}"',
            "NATS_MAX_FILE": "32GB",
        }
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [find_binary(), "-c", self.config_of(name)],
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGKILL),  # noqa: PLW1509 - it makes one system call
            )

    async def keep(self) -> None:
        """Start whichever node ended, a second later, until cancelled: what a node's own supervisor does."""
        while True:
            for name, process in self.processes.items():
                if process.poll() is not None:
                    await anyio.sleep(1.0)
                    self.start(name)
            await anyio.sleep(0.1)

    async def end(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """End a node and wait until it is gone."""
        self.processes[name].send_signal(how)
        await anyio.to_thread.run_sync(self.processes[name].wait)

    async def strike(self, name: str, how: signal.Signals) -> None:
        """End a node, or freeze it (SIGSTOP): it keeps its connections and believes that it still leads."""
        if how == signal.SIGSTOP:
            self.processes[name].send_signal(how)
        else:
            await self.end(name, how)

    def mend(self, name: str) -> None:
        """Start or thaw a node that was struck."""
        if self.processes[name].poll() is None:
            self.processes[name].send_signal(signal.SIGCONT)
        else:
            self.start(name)

    def connect(self, name: str, run: str = RUN, **config: Any) -> Any:
        """Return what `await`s to the bus of `run` on whichever node answers."""
        settings = ConnectionConfig(**{"connect_timeout_s": 60.0} | config)
        return connect(self.url, run=run, name=name, token=TOKEN, config=settings)

    @asynccontextmanager
    async def during(self, name: str) -> AsyncIterator[NatsBus]:
        async with await self.connect(name) as bus:
            yield bus

    afterwards = during


def free_ports(count: int) -> list[int]:
    """Return ports without a listener now, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


async def group_of(bus: NatsBus, stream: str) -> dict[str, Any]:
    """Return what the server says of a stream's replicas."""
    subject = f"$JS.API.STREAM.INFO.{stream_name(bus.run, kind_of(stream))}"
    msg = await bus._link.call_raw(subject, b"", what=stream)
    found: dict[str, Any] = msgspec.json.decode(msg.data).get("cluster", {})
    return found


async def leader_of(bus: NatsBus, stream: str) -> str:
    """Return the node that leads a stream, once one does."""
    with anyio.fail_after(120):
        while not (leader := (await group_of(bus, stream)).get("leader")):  # noqa: ASYNC110
            await anyio.sleep(0.05)
    return str(leader)


async def make_streams(bus: NatsBus, config: StreamsConfig) -> None:
    """Make the streams with three copies, once all servers of a cluster that is starting have found one another."""
    with anyio.fail_after(120):
        while True:
            try:
                await bus.ensure_streams(msgspec.structs.replace(config, replicas=3))
            except ConfigError as error:
                if "too few servers run" not in str(error):
                    raise
                await anyio.sleep(0.1)
            else:
                return


async def settled(bus: NatsBus, streams: Sequence[str], replicas: int = 3) -> None:
    """Wait until every replica of every stream is up to date."""
    with anyio.fail_after(120):
        for stream in streams:
            while True:
                group = await group_of(bus, stream)
                copies = group.get("replicas", [])
                whole = len(copies) == replicas - 1 and all(c["current"] and not c.get("offline") for c in copies)
                if whole and "desired" not in group:
                    break
                await anyio.sleep(0.05)
