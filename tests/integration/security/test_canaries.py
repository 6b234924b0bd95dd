"""A secret planted wherever one can be configured, and looked for everywhere after a run: it is in none of it."""

import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from integration.harness import RUN, SUMS, Run
from integration.proxy import Proxy
from integration.security.test_run import exposed, files_with
from otlp import Received, receiving

from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas.subjects import BUCKET, STREAMS

STEPS = 3
CANARY = "canary-71d0b3"
"""Every planted secret holds it; no two are equal, so that a leak says which one it is."""
ENVIRON = {
    "WANDB_MODE": "offline",
    "WANDB_API_KEY": f"{CANARY}-wandb" + "0" * 40,
    "HF_TOKEN": f"{CANARY}-hub",
    "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{CANARY}-otlp",
    "OPENAI_API_KEY": f"{CANARY}-judge",
    "LACHESIS_TRAINING__WANDB__PROJECT": "p",
}
COMMANDS = (
    ["status", "--json"], ["doctor"], ["config", "show"], ["tail", "score"], ["init"], ["run", "scorer"], ["health"],
    ["run", "trainer"], ["export", "x.jsonl"], ["gc"], ["reproduce"], ["dead", "list"], ["trace", "--follow"], ["up"],
)  # fmt: skip

pytestmark = pytest.mark.timeout(900)


class WithToken(EmbeddedServer):
    """A server with a chosen token, which the run is given in the address. One of `servers.Servers`."""

    arguments: Sequence[str] = ()
    proxies: Sequence[Proxy] = ()

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ServerConfig(max_file_bytes=64 << 30))
        self.token = f"{CANARY}-address"

    def pids(self) -> Mapping[str, int]:
        return {}


class Heard:
    """All that was published on the server while it was listened to."""

    def __init__(self) -> None:
        self.subjects: set[str] = set()
        self.leaks: set[str] = set()

    @asynccontextmanager
    async def listening(self, bus: NatsBus) -> AsyncIterator[None]:
        async def take(message: object) -> None:
            self.subjects.add(message.subject)  # type: ignore[attr-defined]
            if CANARY.encode() in message.data + repr(message.headers).encode():  # type: ignore[attr-defined]
                self.leaks.add(message.subject)  # type: ignore[attr-defined]

        subscription = await bus.client.subscribe(">", cb=take)
        try:
            yield
        finally:
            await subscription.unsubscribe()


async def leaks_in_streams(bus: NatsBus) -> list[str]:
    """Return the subjects of the stored messages that hold a canary, buckets included."""
    found, read = [], 0
    for stream in (*STREAMS, BUCKET):
        async with bus.read(stream, [], follow=False) as messages:
            async for message in messages:
                read += 1
                if CANARY.encode() in message.data + repr(message.headers).encode():
                    found.append(message.subject)
    assert read > 10
    return found


def leaks_in_telemetry(received: Received) -> list[str]:
    told = [*map(str, received.spans), *map(str, received.metrics.items()), *map(str, received.resources.items())]
    assert len(told) > 10
    return [text for text in told if CANARY in text]


def configure(run: Run) -> None:
    """Put an environment with secrets among its parameters into the run's configuration."""
    file = run.folder / "keyed.py"
    file.write_text(SUMS.read_text().replace("largest: int = 99", "api_key: str, service: str, largest: int = 99"))
    text = run.config.read_text()
    params = f'params = {{ api_key = "{CANARY}-param", service = "https://me:{CANARY}-service@host/x" }}\n'
    parts = text.replace(str(SUMS), str(file)).split(':Sums"\n')
    run.config.write_text(f':Sums"\n{params}'.join(parts))


@pytest.mark.slow
async def test_no_planted_secret_is_found_after_a_run(tmp_path: Path) -> None:
    async with (
        WithToken(tmp_path / "server") as server,
        await connect(server.url, run=RUN, name="t", token=server.token) as bus,
    ):
        with receiving("grpc") as received:
            environ = {
                **ENVIRON,
                "LACHESIS_NATS__URL": server.url.replace("://", f"://{server.token}@"),
                "LACHESIS_TELEMETRY__RATIO": "1.0",
                "OTEL_EXPORTER_OTLP_ENDPOINT": received.url,
            }
            (tmp_path / "run").mkdir()
            run = Run(tmp_path / "run", STEPS, server, environ=environ)
            configure(run)
            run.start()
            heard = Heard()
            async with heard.listening(bus):
                with run:
                    await run.wait_for_step(1, 300)
                    shown = [line for pid in run.pids().values() for line in exposed(pid)]
                    assert await run.wait(300) == 0, run.tail()
            assert leaks_in_telemetry(received) == []
        assert any(subject.startswith("rl.heartbeat.") for subject in heard.subjects)
        assert heard.leaks == set()
        assert await leaks_in_streams(bus) == []
        assert not [line for line in shown if CANARY in line and line.partition("=")[0] not in {*environ, *_HANDED_ON}]
        export = await lachesis(run, environ, "export", str(tmp_path / "export.jsonl"))
        assert export.returncode == 0, export.stderr
        assert CANARY not in (tmp_path / "export.jsonl").read_text()
        for command in (["status", "--json"], ["config", "show"], ["config", "show", "--json"], ["doctor"], ["health"]):
            done = await lachesis(run, environ, *command)
            assert CANARY.encode() not in done.stdout + done.stderr, command
        kept_by_us = {"run.toml", "run.effective.toml"}  # mode 0600: the parameters that the services start with
        found = {name for name, _ in files_with([CANARY], run.folder)}
        assert found <= kept_by_us
        assert all((run.folder / name).stat().st_mode & 0o077 == 0 for name in found - {"run.toml"})
        tokens = [file.read_text().strip() for file in (run.folder / "inference").glob("*.token")]
        assert tokens
        assert {name for name, _ in files_with(tokens, run.folder, tmp_path / "server")} <= {
            file.name for file in (run.folder / "inference").glob("*.token")
        }
        assert not [line for line in shown if any(token in line for token in tokens)]


_HANDED_ON = {"WANDB_API_KEY", "WANDB_SERVICE", "LACHESIS_NATS__URL"}


async def lachesis(run: Run, environ: Mapping[str, str], *command: str) -> "anyio.abc.CompletedProcess[bytes]":
    return await anyio.run_process(
        [sys.executable, "-m", "lachesis", *command, *run.arguments], env={**run.environ, **environ}, check=False
    )


@pytest.mark.parametrize("address", ["nats://{}@127.0.0.1:1", "nats://me:{}@127.0.0.1:1", "tls://me:{}@127.0.0.1:1"])
async def test_an_address_that_nobody_serves_is_named_without_its_secret(tmp_path: Path, address: str) -> None:
    done = await anyio.run_process(
        [sys.executable, "-m", "lachesis", "status", "--set=nats.connect_timeout_s=0.1", "--run", "r"],
        env={**ENVIRON, "PATH": "/usr/bin", "LACHESIS_NATS__URL": address.format(CANARY), "HOME": str(tmp_path)},
        cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert b"127.0.0.1:1" in done.stderr
    assert CANARY.encode() not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_no_command_says_a_secret_when_it_fails(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "token").write_text(f"{CANARY}-file")
    (tmp_path / "nkey").write_text(f"SU{CANARY}".upper())
    (tmp_path / "run.toml").write_text(
        f'run = "r"\n[environments.sums]\nkind = "none.py:None"\nparams = {{ api_key = "{CANARY}-param" }}\n'
        f'[nats]\nurl = "nats://me:{CANARY}-password@127.0.0.1:1"\nconnect_timeout_s = 0.1\n'
    )
    for sets in ((), ("nats.token_file=token",), ("nats.nkey_file=nkey",), ("batching.batch_size=x",)):
        done = await anyio.run_process(
            [sys.executable, "-m", "lachesis", *command, "--config=run.toml", *(f"--set={one}" for one in sets)],
            env={**ENVIRON, "PATH": "/usr/bin", "HOME": str(tmp_path)}, cwd=tmp_path, check=False,
        )  # fmt: skip
        said = (done.stdout + done.stderr).decode()
        assert CANARY.lower() not in said.lower(), (command, sets, said)
        assert "Traceback" not in said, (command, sets, said)
        assert done.returncode != 0 or command[0] == "config", (command, sets, said)
