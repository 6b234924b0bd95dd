"""Agents that run elsewhere, over the official SDK, while two endpoints behind one address are killed in turn."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

import anyio
import pytest
from integration.audit import audit

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

pytestmark = [pytest.mark.slow, pytest.mark.extension]

AGENT = Path(__file__).with_name("outside_agent.py")
AGENTS = 8
KILLS = 2
CONFIG = """
run = "elsewhere"
model = "model"
[environments.words]
kind = "agent"
samples = 2
longest_tokens = 1024
max_new_tokens = 8
concurrency = 1
[environments.words.params]
path = "tasks.jsonl"
task_params = {{ answer = "" }}
reward = "program"
token_file = "sessions.token"
port = {one}
peers = ["http://127.0.0.1:{one}", "http://127.0.0.1:{two}"]
hold_s = 5.0
[flow]
lease_s = 6.0
[batching]
batch_size = 4
[evaluate]
held_out = 0
[training]
steps = 6
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def one_address(ports: list[int]) -> Iterator[str]:
    """Yield the address of a plain round robin: each connection goes to the next of `ports`, be it there or not."""
    turns = cycle(ports)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def serve(client: socket.socket, port: int) -> None:
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=copy, args=(server, client), daemon=True)
            back.start()
            copy(client, server)
            back.join()

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=serve, args=(client, next(turns)), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


class TwoEndpoints:
    """A run with an endpoint, of which a second replica runs beside it."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.folder, self.run = folder, folder / "runs" / "elsewhere"
        self._second = ["--set", f"environments.words.params.port={ports[1]}", "--replica", "2"]
        self._log = (folder / "log").open("ab")
        self.up = self._start("up", "--config", "run.toml")
        self.second: subprocess.Popen[bytes] | None = None

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "lachesis", *arguments],
            cwd=self.folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def keep_second(self) -> None:
        """Start the second replica once there is a run, and whenever it has ended, as a machine's init would."""
        if (self.run / "pids.json").exists() and (self.second is None or self.second.poll() is not None):
            self.second = self._start("run", "environment", "words", "--config", "run.toml", *self._second)

    def kill(self, place: int) -> None:
        if place == 0:
            os.kill(int(json.loads((self.run / "pids.json").read_text())["environment-words"]), 9)
        elif self.second is not None:
            self.second.kill()

    @property
    def trained(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count('"train/step"') if metrics.exists() else 0

    def close(self) -> None:
        for process in filter(None, (self.second, self.up)):
            process.terminate()
            process.wait()
        self._log.close()


@pytest.mark.timeout(540)
def test_agents_elsewhere_go_on_while_two_endpoints_are_killed_and_no_sample_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=512), tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {one}"}) + "\n" for one in "abcdefgh"))
    ports = [free_port(), free_port()]
    (tmp_path / "run.toml").write_text(CONFIG.format(one=ports[0], two=ports[1]))
    notes = [tmp_path / f"agent-{number}.jsonl" for number in range(AGENTS)]
    endpoints, agents = TwoEndpoints(tmp_path, ports), list[subprocess.Popen[bytes]]()
    kills = 0
    try:
        with one_address(ports) as address:
            for place in notes:
                command = [sys.executable, "-I", str(AGENT), address, str(tmp_path / "sessions.token"), str(place)]
                agents.append(subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL))
            while endpoints.up.poll() is None:  # the test's own limit ends it
                endpoints.keep_second()
                if endpoints.trained > kills and kills < KILLS:
                    endpoints.kill(kills % 2)
                    kills += 1
                with suppress(subprocess.TimeoutExpired):
                    endpoints.up.wait(0.2)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
        endpoints.close()
    text = (tmp_path / "log").read_text()
    assert endpoints.up.returncode == 0, text
    assert kills == KILLS
    got = [json.loads(line) for place in notes if place.exists() for line in place.read_text().splitlines()]
    assert max(Counter(one["key"] for one in got).values()) == 1
    worked_on = Counter(one["key"].partition(".")[0] for one in got if "ended" not in one)
    assert max(worked_on.values()) == 1, "two agents worked on one sample"
    trained_ones = anyio.run(trained_conversations, endpoints.run)
    whole = Counter(tuple(one["answers"]) for one in got)
    assert len(trained_ones) >= 20
    assert not Counter(trained_ones) - whole, "what is trained is what an agent got, each conversation once"


async def trained_conversations(run: Path) -> list[tuple[str, ...]]:
    """Return the answers of each trained sample, once nothing is found to be lost or doubled."""
    found = []
    async with (
        EmbeddedServer(run / "nats") as server,
        await connect(server.url, run="elsewhere", name="audit", token=server.token) as bus,
    ):
        assert (await audit(bus, "elsewhere")).violations == []
        async for entry in follow_ledger(bus, "elsewhere", "main", LedgerPosition(), follow=False):
            if entry.batch is not None:
                for _, group, _ in await fetch_batch(bus, entry.batch):
                    for conversation in group.messages:
                        said = [message.content for message in conversation if message.role == "assistant"]
                        found.append(tuple(said))
    return found
