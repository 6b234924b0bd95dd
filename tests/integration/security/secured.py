"""A nats-server as one's own would be: TLS, and the users and permissions that `lachesis auth init` wrote."""

import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import trustme
from integration.proxy import Proxy
from nats.aio.client import Client

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig
from lachesis.pipeline.bus.connection import _tls, connect, for_identity
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

__all__ = ["Secured", "auth_init", "make_certificates"]


def make_certificates(folder: Path) -> None:
    """Write `ca.pem`, the server's `server.pem` and `server.key`, and a client's `client.pem` and `client.key`."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    for name, identities in (("server", ["127.0.0.1"]), ("client", ["someone@lachesis"])):
        issued = authority.issue_cert(*identities)
        issued.private_key_pem.write_to_path(folder / f"{name}.key")
        (folder / f"{name}.key").chmod(0o600)
        for index, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(folder / f"{name}.pem", append=index > 0)


def auth_init(folder: Path, *arguments: str, config: str = "") -> str:
    """Run `lachesis auth init` on `folder` and return what it prints; `config` is the run's TOML."""
    (folder / "auth.toml").write_text(config)
    command = [sys.executable, "-m", "lachesis", "auth", "init", "--out", folder, "--config", folder / "auth.toml"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Secured(EmbeddedServer):
    """A server on `folder`, which holds `auth.conf`. One of `integration.servers.Servers` for the run `run`."""

    proxies: Sequence[Proxy] = ()

    def __init__(self, folder: Path, run: str, *, tls: bool = True) -> None:
        super().__init__(folder / "store", ServerConfig(max_file_bytes=64 << 30))
        self.folder = folder
        self.run = run
        self.tls = tls

    def _config_text(self) -> str:
        text = super()._config_text()
        kept = [line for line in text.splitlines() if not line.startswith("authorization")]
        return "\n".join([*kept, 'include "../auth.conf"', ""])

    def _listening(self) -> tuple[str, int] | None:
        for file in self.store.glob("*.ports"):  # as its like, but for the scheme that it writes where it has TLS
            file.write_text(file.read_text().replace("tls://", "nats://"))
        return super()._listening()

    @property
    def address(self) -> str:
        return self.url.replace("nats://", "tls://") if self.tls else self.url

    @property
    def keys(self) -> Path:
        return self.folder / "auth" / self.run

    @property
    def arguments(self) -> Sequence[str]:
        sets = {"nats.url": self.address, "nats.nkey_folder": str(self.keys)}
        sets |= {"nats.ca_file": str(self.folder / "ca.pem")} if self.tls else {}
        return [f"--set={key}={value}" for key, value in sets.items()]

    def pids(self) -> Mapping[str, int]:
        return {"nats-server": self.pid}

    def config(self, **more: Any) -> ConnectionConfig:
        """Return how any identity of the run connects."""
        if self.tls:
            more = {"ca_file": str(self.folder / "ca.pem"), **more}
        return ConnectionConfig(**{"url": self.address, "nkey_folder": str(self.keys), **more})

    def connection(self, identity: str, **more: Any) -> ConnectionConfig:
        """Return how `identity` connects."""
        return for_identity(self.config(**more), identity)

    async def bus(self, identity: str, **more: Any) -> NatsBus:
        run = Path(more.get("nkey_folder", self.keys)).name
        return await connect(run=run, name=f"test.{identity}", config=self.connection(identity, **more))

    @asynccontextmanager
    async def client(self, identity: str) -> AsyncIterator[Client]:
        """Yield a bare connection with the key of `identity`, which outlives what the server refuses it."""

        async def pass_over(_: Exception) -> None:
            """Refusals are expected."""

        config = self.connection(identity)
        client = await nats.connect(
            self.address, tls=_tls(config) if self.tls else None, nkeys_seed=config.nkey_file,
            inbox_prefix=config.inbox_prefix, error_cb=pass_over, allow_reconnect=False, connect_timeout=30,
        )  # fmt: skip
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def during(self, name: str) -> AsyncIterator[NatsBus]:
        async with await self.bus(OPERATOR) as bus:
            yield bus

    afterwards = during
