"""Agents that run elsewhere, over the official SDK, while two endpoints behind one address are killed and stopped."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from integration.audit import audit

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.embedded import EmbeddedServer, read_endpoint
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.pipeline.model.policy import build_tiny_policy, save_policy
from lachesis.schemas import subjects
from lachesis.schemas.calls import CALL_HEADER, CallKey, GroupStart, SessionCall
from lachesis.schemas.codec import decode

pytestmark = [pytest.mark.slow, pytest.mark.extension]

AGENT = Path(__file__).with_name("outside_agent.py")
AGENTS = 6
SAMPLES = 2
STOPPED_AT = ("call", "session")
"""Kinds of records: in the middle of the conversations, and at the end of one."""
HANGS_S = 800.0
"""Seconds after which the test is given up, however slow the machine."""
CONFIG = """
run = "elsewhere"
model = "model"
[environments.words]
kind = "agent"
samples = {samples}
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
hold_s = 2.0
time_limit_s = 60.0
[flow]
lease_s = 4.0
[batching]
batch_size = 4
[evaluate]
held_out = 0
[training]
steps = 1000
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


@contextmanager
def one_address(ports: list[int]) -> Iterator[str]:
    """Yield an address whose connections go to `ports` by chance, whether an endpoint is there or not.

    In turn, agents that all wait as long as each other for a stopped endpoint might come to it every time.
    """
    chance = random.Random(0)

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
                threading.Thread(target=serve, args=(client, chance.choice(ports)), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@contextmanager
def working_agents(folder: Path, address: str) -> Iterator[list[Path]]:
    """Let agents work while the context lasts; yields the files of their notes."""
    notes, agents = [folder / f"agent-{number}.jsonl" for number in range(AGENTS)], list[subprocess.Popen[bytes]]()
    try:
        for place in notes:
            command = [sys.executable, "-I", str(AGENT), address, str(folder / "sessions.token"), str(place)]
            agents.append(subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL))
        yield notes
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


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

    async def stop_second(self, bus: Bus, at: str) -> None:
        """Stop the second replica at a record of that kind, until another process works on the group of it.

        A record that it had stored before it stopped may have ended the group: then it is stopped at a later one.
        """
        held, stopped, is_taken_up = set[str](), "", False
        assert self.second is not None
        try:
            async with bus.read(subjects.CALLS, [subjects.call("elsewhere")], headers_only=True) as records:
                async for record in records:
                    key = CallKey.unpack(record.headers[CALL_HEADER])
                    is_second = (key.holder or "").startswith("environment-words-2.")
                    if key.kind == "start":
                        (held.add if is_second else held.discard)(key.group)
                        is_taken_up |= key.group == stopped and not is_second
                    elif key.group == stopped and is_taken_up:
                        return
                    elif key.kind == "end":
                        held.discard(key.group)
                        if key.group == stopped:
                            self.second.send_signal(signal.SIGCONT)
                            stopped = ""
                    elif key.kind == at and key.group in held and records.caught_up and not stopped:
                        self.second.send_signal(signal.SIGSTOP)
                        stopped = key.group
        finally:
            self.second.send_signal(signal.SIGCONT)

    @property
    def trained(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count('"train/step"') if metrics.exists() else 0

    async def train_further(self) -> None:
        """Wait until a further batch is trained, with two replicas."""
        before = self.trained
        while self.trained == before:
            assert self.up.poll() is None, (self.folder / "log").read_text()
            self.keep_second()
            await anyio.sleep(0.2)

    def close(self) -> None:
        for process in filter(None, (self.second, self.up)):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()
        self._log.close()


@asynccontextmanager
async def bus_of(run: Path) -> AsyncIterator[Bus]:
    """Connect to the server of a run that goes on."""
    where = read_endpoint(run / "nats")
    async with await connect(where.url, run="elsewhere", name="watch", token=where.token) as bus:
        yield bus


class CallLog:
    """The starts and calls of each group, each with its sequence, also of groups that are deleted later."""

    def __init__(self) -> None:
        self._starts: dict[str, list[tuple[int, GroupStart]]] = {}
        self._calls: dict[str, list[tuple[int, SessionCall]]] = {}

    async def follow(self, bus: Bus) -> None:
        """Read the log until cancelled."""
        async with bus.read(subjects.CALLS, [subjects.call("elsewhere")]) as records:
            async for record in records:
                key = CallKey.unpack(record.headers[CALL_HEADER])
                if key.kind == "start":
                    self._starts.setdefault(key.group, []).append((record.seq, decode(GroupStart, record.data)))
                elif key.kind == "call":
                    self._calls.setdefault(key.group, []).append((record.seq, decode(SessionCall, record.data)))

    def check(self) -> None:
        """Each request has one answer that counts; of a life that was replaced, each session stores one more at most.

        That is what a stopped process may be about to store; it looks at its lease before each.
        """
        for group, starts in self._starts.items():
            if starts[0][1].known_seq:
                continue  # it has begun before the log was read
            counted, late = Counter[Any](), Counter[Any]()
            for seq, call in self._calls.get(group, []):
                is_late = any(seq < at and seq > start.known_seq for at, start in starts)
                is_late |= any(at < seq and call.life < start.life for at, start in starts)
                where = late if is_late else counted
                where[(call.session, call.life) if is_late else (call.session, call.parent, call.digest)] += 1
            assert max(counted.values(), default=0) <= 1, f"group {group} has two answers to one request"
            assert max(late.values(), default=0) <= 1, f"group {group}: a replaced life went on"


@pytest.mark.timeout(900)
async def test_agents_elsewhere_go_on_while_two_endpoints_are_killed_and_stopped_and_no_sample_is_lost_or_doubled(
    tmp_path: Path,
) -> None:
    """Where the second one is stopped, the first one takes its group up; then the second one goes on, too."""
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=512), tmp_path / "model")
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": f"Say {one}"}) + "\n" for one in "abcdefgh"))
    ports = [free_port(), free_port()]
    (tmp_path / "run.toml").write_text(CONFIG.format(samples=SAMPLES, one=ports[0], two=ports[1]))
    endpoints, calls = TwoEndpoints(tmp_path, ports), CallLog()
    try:
        with anyio.fail_after(HANGS_S), one_address(ports) as address, working_agents(tmp_path, address) as notes:
            await endpoints.train_further()
            async with bus_of(endpoints.run) as bus, anyio.create_task_group() as tasks:
                tasks.start_soon(calls.follow, bus)
                for place in (0, 1):
                    endpoints.kill(place)
                    await endpoints.train_further()
                for at in STOPPED_AT:
                    await endpoints.stop_second(bus, at)
                await endpoints.train_further()
                tasks.cancel_scope.cancel()
    finally:
        endpoints.close()
    assert endpoints.up.returncode == 0, (tmp_path / "log").read_text()
    calls.check()
    noted = [json.loads(line) for place in notes if place.exists() for line in place.read_text().splitlines()]
    got = [one for one in noted if "answers" in one]
    assert max(Counter(one["key"] for one in got).values()) == 1
    ended = Counter(one["key"].partition(".")[0] for one in noted if "reported" in one)
    assert max(ended.values()) == 1, "a sample took the reports of two agents"
    trained_ones = await trained_conversations(endpoints.run)
    whole = Counter(answers for _, answers in {(one["key"].partition(".")[0], tuple(one["answers"])) for one in got})
    assert len(trained_ones) >= 12
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
