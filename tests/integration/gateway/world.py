"""A run around a gateway that is a process: the stages are real.

The trainer is played, unless the run's mode is `observe`: then a test has one of its own.
"""

import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
from stages import run_batcher, run_curriculum, run_governor, run_normalizer, run_scorer

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.extensions.atropos.gateway.listener import LISTENER_FD
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import keys, subjects
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import Heartbeat, PolicyRecord
from lachesis.schemas.ledger import Batch
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["CONFIG", "MAX_STALENESS", "World"]

MAX_STALENESS = 2
CONFIG = """
run = "g"
mode = "{mode}"
{environments}
[batching]
batch_size = {batch_size}
max_staleness = {max_staleness}
mix = {mix}
[flow]
lease_s = 5.0
retry_s = 0.05
[gateway]
port = {port}
needs_token = false
hold_s = 120.0
"""
ENVIRONMENT = """
[environments.{name}]
kind = "gateway"
longest_tokens = 64
"""
STAGES: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("governor", run_governor), ("batcher", run_batcher), ("normalizer", run_normalizer), ("scorer", run_scorer),
    ("curriculum", run_curriculum),
)  # fmt: skip


class World:
    """`batches` are those trained so far; `worst` is the most sequences that the governor ever counted.

    The played trainer awaits `before_step` before each step.
    """

    def __init__(
        self,
        bus: NatsBus,
        server: Any,
        folder: Path,
        *,
        mode: str = "train",
        batch_size: int = 8,
        mix: str = "{}",
        before_step: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
        environments: Sequence[str] = ("words", "sums"),
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)  # held as `lachesis up` does
        self.port = self._listener.getsockname()[1]
        self._trains = mode == "train"
        self._before_step = before_step
        self.bus = bus
        self.file = folder / "run.toml"
        sections = "".join(ENVIRONMENT.format(name=name) for name in environments)
        self.file.write_text(
            CONFIG.format(
                port=self.port,
                mode=mode,
                batch_size=batch_size,
                max_staleness=MAX_STALENESS,
                mix=mix,
                environments=sections,
            )
        )
        (folder / "token").write_text(server.token)
        self.arguments = ["--config", str(self.file), "--nats", server.url, "--set", f"nats.token_file={folder}/token"]
        self.config: RunConfig = load(run_config_type(), file=self.file).config
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "gateway.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.batches: list[Batch] = []
        self.trains = anyio.Event()
        self.worst = 0.0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with anyio.create_task_group() as tasks:
                for name, stage in STAGES:
                    tasks.start_soon(self._live, name, stage)
                for task in (self._train, self._follow_governor) if self._trains else (self._follow_governor,):
                    tasks.start_soon(task)
                await self.start()
                yield
                tasks.cancel_scope.cancel()
        finally:
            self.kill()
            self._listener.close()

    async def _live(self, name: str, stage: Callable[..., Any]) -> None:
        async with open_service(self.bus, name, self.config.run) as service:
            await stage(service, self.config)

    async def start(self) -> None:
        """Start the gateway, and return when it answers."""
        self.process = self._spawn()
        async with httpx.AsyncClient(trust_env=False) as http:
            with anyio.fail_after(90):
                while self.process.poll() is None:
                    try:
                        await http.get(self.url)
                    except httpx.HTTPError:
                        await anyio.sleep(0.05)
                    else:
                        return
        raise AssertionError(self.log.read_text())

    def _spawn(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "lachesis", "run", "gateway", *self.arguments]
        number = self._listener.fileno()
        environ = {**os.environ, LISTENER_FD: str(number)}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, pass_fds=[number]
            )

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def _train(self) -> None:
        await self._publish(0)
        async with aclosing(follow_ledger(self.bus, self.config.run, "main", LedgerPosition())) as entries:
            async for entry in entries:
                if entry.batch is not None:
                    await self.trains.wait()
                    await self._before_step()
                    self.batches.append(entry.batch)
                    await self._publish(len(self.batches))

    async def _publish(self, step: int) -> None:
        record = PolicyRecord(run="g", version=f"{step}-a-b", weights="w", tokenizer_hash="tok", written_ns=step + 1)
        await self.bus.put(keys.POLICY, encode(record))

    async def _follow_governor(self) -> None:
        async with self.bus.listen(subjects.heartbeat("g", "governor")) as beats:
            async for message in beats:
                figures = decode(Heartbeat, message.data).metrics
                self.worst = max(self.worst, figures.get("flow/outstanding", 0.0))

    async def groups(self) -> list[RolloutGroup]:
        async with self.bus.read(subjects.ROLLOUTS, [subjects.rollout("g")], follow=False) as stored:
            return [decode(RolloutGroup, message.data) async for message in stored]

    async def outcomes(self) -> Counter[str]:
        """Count what became of the rollouts, by kind; asserts that none has two outcomes."""
        found: dict[int, str] = {}
        async with aclosing(follow_ledger(self.bus, "g", "main", LedgerPosition(), follow=False)) as entries:
            async for entry in entries:
                settled = [(outcome.seq, outcome.kind) for outcome in entry.outcomes]
                settled += [(ref.seq, "batched") for ref in (entry.batch.groups if entry.batch else [])]
                for seq, kind in settled:
                    assert seq not in found
                    found[seq] = kind
        return Counter(found.values())
