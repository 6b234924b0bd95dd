"""A whole run on a server of one's own: TLS, every process with the key of its service, and no word of any secret.

What the services write and what they may read of their fellows is in `test_permissions`; here they do their work.
"""

import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import psutil
import pytest
from integration.audit import audit
from integration.harness import CONFIG, RUN, SUMS, Run, until
from integration.proxy import Proxy
from integration.security.secured import Secured, auth_init, make_certificates
from integration.servers import Servers, Supervised

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint
from lachesis.services.run.connect import NATS_FOLDER
from lachesis.services.run.run_file import EFFECTIVE_FILE

STEPS = 6
CANARY = "canary-8c1f2e"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
async def secured_run(tmp_path: Path) -> AsyncIterator[tuple[Run, Secured]]:
    folder = tmp_path / "server"
    folder.mkdir()
    make_certificates(folder)
    tls = ("--cert", str(folder / "server.pem"), "--key", str(folder / "server.key"))
    auth_init(folder, *tls, "--run", RUN, config=CONFIG.format(sums=SUMS, steps=STEPS))
    async with Secured(folder, RUN) as server:
        yield start(tmp_path, server), server


def start(folder: Path, servers: Servers, environ: Mapping[str, str] | None = None) -> Run:
    (folder / "run").mkdir()
    run = Run(folder / "run", STEPS, servers, environ=environ)
    run.start()
    return run


async def finish(run: Run) -> list[str]:
    """Let the run train, and return what its processes showed of themselves meanwhile."""
    with run:
        await run.wait_for_step(2, 300)
        shown = [line for pid in run.pids().values() for line in exposed(pid)]
        assert await run.wait(300) == 0, run.tail()
    return shown


def exposed(pid: int) -> list[str]:
    """Return a process's command line and environment, as far as it has not ended."""
    try:
        process = psutil.Process(pid)
        return [*process.cmdline(), *(f"{name}={value}" for name, value in process.environ().items())]
    except psutil.NoSuchProcess:
        return []


def files_with(secrets: list[str], *folders: Path) -> set[tuple[str, str]]:
    """Return (file, secret) for each file of the folders that holds one of them; files may come and go meanwhile."""
    found = set()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):
                    content = (Path(parent) / name).read_bytes()
                    found |= {(name, secret) for secret in secrets if secret.encode() in content}
    return found


async def test_every_service_works_with_its_own_key_over_tls(secured_run: tuple[Run, Secured]) -> None:
    run, server = secured_run
    shown = await finish(run)
    async with server.during("audit") as bus:
        found = await audit(bus, RUN)
        assert found
    log = b"".join(file.read_bytes() for file in (run.folder / "logs").iterdir())
    assert b"refused" not in log
    assert b"violation" not in log.lower()
    said = server.log_path.read_text()
    assert "violation" not in said.lower(), said
    files = list(server.keys.glob("*.nk"))
    assert {file.stem for file in files} >= {"trainer", "scorer", "operator", "environment-sums"}
    seeds = [file.read_text().strip() for file in files]
    assert not [line for line in shown if any(seed in line for seed in seeds)]
    assert files_with(seeds, run.folder, server.store) == set()


async def test_the_embedded_servers_token_is_in_two_private_files_alone(tmp_path: Path) -> None:
    servers = Supervised(tmp_path / "run")
    run = start(tmp_path, servers)
    await until(lambda: bool(servers.pids()) and (run.folder / NATS_FOLDER / "endpoint.json").exists(), 120)
    endpoint = read_endpoint(run.folder / NATS_FOLDER)
    listening = [c for c in psutil.Process(endpoint.pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"], "one port, on loopback; no monitoring"
    store = run.folder / NATS_FOLDER
    assert store.stat().st_mode & 0o077 == 0
    for file in (run.folder / NATS_FOLDER).iterdir():
        if file.is_file():
            assert file.stat().st_mode & 0o077 == 0, file
    assert files_with([endpoint.token], run.folder) == {
        ("endpoint.json", endpoint.token),
        ("nats-server.conf", endpoint.token),
    }
    shown = await finish(run)
    assert len(shown) > 100
    assert not [line for line in shown if endpoint.token in line]
    assert {name for name, _ in files_with([endpoint.token], run.folder)} == {"nats-server.conf"}


class WithToken(EmbeddedServer):
    """A server of one's own with a token, which the run is given in the address. One of `servers.Servers`."""

    arguments: Sequence[str] = ()
    proxies: Sequence[Proxy] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ServerConfig(max_file_bytes=64 << 30))
        self.token = CANARY

    def pids(self) -> Mapping[str, int]:
        return {}


async def test_a_token_in_an_address_is_shown_nowhere(tmp_path: Path) -> None:
    async with WithToken(tmp_path / "server") as server:
        url = server.url.replace("://", f"://{CANARY}@")
        environ = {"LACHESIS_NATS__URL": url, "LACHESIS_TRAINING__WANDB__PROJECT": "p", "WANDB_MODE": "offline"}
        run = start(tmp_path, server, environ)
        shown = await finish(run)
        variables = ("LACHESIS_NATS__URL=", "WANDB_")  # what we gave them, and what wandb hands to its own process
        assert not [line for line in shown if CANARY in line and not line.startswith(variables)]
        assert any(run.folder.glob("wandb/offline-run-*/*.wandb"))
        # `lachesis status --run NAME` connects by this file from any folder
        assert files_with([CANARY], run.folder) == {(EFFECTIVE_FILE, CANARY)}
        assert (run.folder / EFFECTIVE_FILE).stat().st_mode & 0o077 == 0
        wrong = url.replace(CANARY, f"{CANARY}-wrong")
        for command in (["status"], ["doctor"], ["config", "show"], ["tail", "score"], ["init"], ["run", "scorer"]):
            done = await anyio.run_process(
                [sys.executable, "-m", "lachesis", *command, *run.arguments],
                env={**run.environ, "LACHESIS_NATS__URL": wrong},
                check=False,
            )
            assert CANARY.encode() not in done.stdout + done.stderr, command
            assert command[0] == "config" or done.returncode != 0, command
        on_the_line = await anyio.run_process(
            [sys.executable, "-m", "lachesis", "status", "--nats", url, *run.arguments], check=False
        )
        assert b"nats.url: a password or token in a command line" in on_the_line.stderr
        assert CANARY.encode() not in on_the_line.stderr
