"""Rank 0 of a trainer: starts the other ranks, directs them, and ends with the first that is lost.

Guarantees that a rank that ends, however that happens, ends the whole trainer within seconds, so that it starts again
from its newest checkpoint; and that no rank outlives rank 0.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.abc import Process, SocketAttribute, SocketStream, TaskGroup

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import OutOfMemoryError, RankLostError, StartupError
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.gather import gather_optimizer
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.ranks.absent import report_absent_ranks
from lachesis.pipeline.trainer.ranks.join import join_as_leader, rank_start
from lachesis.pipeline.trainer.ranks.messages import (
    GONE,
    Fetched,
    GatherOptimizer,
    Hello,
    JoinRun,
    Message,
    NoMemory,
    RankStream,
    Stop,
    TrainNext,
)
from lachesis.pipeline.trainer.ranks.place import STORE_VARIABLE, RankPlace
from lachesis.pipeline.trainer.ranks.process_group import (
    GRACE_S,
    end_process_after,
    in_thread,
    meet,
    open_process_group,
)
from lachesis.pipeline.trainer.settings import TrainerSettings

__all__ = ["EXIT_NO_MEMORY", "EXIT_RANK_LOST", "RANK_KEY", "Leader", "lead_ranks"]

log = logging.getLogger("lachesis")

RANK_KEY = "lachesis/leader"
"""Key of the store under which rank 0 says where it listens."""
EXIT_RANK_LOST = 9
EXIT_NO_MEMORY = 11
_EXIT_STARTUP = 2
_STOP_S = 10.0
"""Seconds the other ranks have to end after the request to end."""


@dataclass(slots=True)
class Leader:
    """The other ranks, as rank 0 sees them; without any, each call acts as for a lone trainer."""

    settings: TrainerSettings
    device: torch.device
    ranks: Ranks = ALONE
    streams: dict[int, RankStream] = field(default_factory=dict)
    fetched: dict[int, int] = field(default_factory=dict)
    """By rank, the index of the newest entry whose share it has."""
    heard_s: dict[int, float] = field(default_factory=dict)
    """By rank, when it was heard last, by `time.monotonic`."""
    expected: int = 1
    """How many ranks there should be."""
    pids: dict[int, int] = field(default_factory=dict)
    """By rank, the process, if this one has started it."""
    changed: anyio.Event = field(default_factory=anyio.Event)
    starts_ranks: bool = False
    """Whether the others are processes of this one, whose ends say more than those of their connections."""
    stopping: bool = False
    """Whether the end of a rank is no news."""

    async def join(self, policy: PolicyModel, learner: Learner, feed: BatchFeed) -> Learner:
        """Bring all ranks to where `learner` and `feed` are; return the learner to go on with."""
        if self.ranks.size == 1:
            return learner
        training, settings = self.settings.training, self.settings
        start = rank_start(policy, learner, feed.position, run=settings.run, training=training, seed=settings.seed)
        await self._send(JoinRun(start))
        feed.ranks = (self.ranks.rank, self.ranks.size)
        return await in_thread(self.ranks, join_as_leader, policy, learner, start, self.ranks, self.device)

    async def begin_batch(self, batch: LedgerBatch) -> None:
        """Have all ranks train the batch; return once each has its share of it."""
        if self.ranks.size == 1:
            return
        await self._send(TrainNext(batch.entry.index, batch.entry.digest()))
        while missing := [rank for rank in self.streams if self.fetched.get(rank) != batch.entry.index]:
            log.debug("batch %d: ranks %s are fetching their shares", batch.batch.number, missing)
            self.changed = anyio.Event()
            await self.changed.wait()

    async def gather_optimizer(self, learner: Learner) -> None:
        """Make the optimizer's state whole on this rank, for a checkpoint."""
        if learner.sharded is not None:
            await self._send(GatherOptimizer())
            await in_thread(self.ranks, gather_optimizer, learner)

    async def all_here(self, size: int) -> None:
        """Return once all ranks have connected."""
        while len(self.streams) + 1 < size:
            self.changed = anyio.Event()
            await self.changed.wait()

    async def _send(self, message: Message) -> None:
        for rank, stream in self.streams.items():
            try:
                await stream.send(message)
            except GONE as error:
                raise RankLostError(f"rank {rank} of the trainer has ended") from error

    async def stop(self) -> None:
        """Tell the others to end."""
        self.stopping = True
        with suppress(RankLostError):
            await self._send(Stop())

    async def listen(self, stream: RankStream, rank: int) -> None:
        """Take in what a rank says until it has gone."""
        self.streams[rank], self.heard_s[rank] = stream, time.monotonic()
        self.changed.set()
        try:
            while True:
                message = await stream.receive()
                self.heard_s[rank] = time.monotonic()
                match message:
                    case Fetched(index):
                        self.fetched[rank] = index
                        self.changed.set()
                    case NoMemory(text) if not self.stopping:
                        self.lose(rank, f"ran out of memory ({text})", EXIT_NO_MEMORY)
        except (*GONE, msgspec.DecodeError):
            if not self.stopping and not self.starts_ranks:
                self.lose(rank, "has ended, or its connection has", EXIT_RANK_LOST)

    def lose(self, rank: int, how: str, code: int) -> NoReturn:
        """End the trainer, since a rank has gone.

        Raises `RankLostError`, `StartupError` where the rank cannot start, or `OutOfMemoryError` where it has no room.
        """
        self.stopping = True
        text = f"rank {rank} of the trainer {how}"
        log.error("%s: all ranks end, and the next start goes on from the newest checkpoint", text)
        lasting = {_EXIT_STARTUP: StartupError, EXIT_NO_MEMORY: OutOfMemoryError}.get(code)
        end_process_after(GRACE_S, EXIT_RANK_LOST if lasting is None else code)
        raise RankLostError(text) if lasting is None else lasting(f"{text}; its own lines above say why")


@asynccontextmanager
async def lead_ranks(
    service: Service, settings: TrainerSettings, place: RankPlace, device: torch.device
) -> AsyncIterator[Leader]:
    """Start the other ranks if necessary, open the process group, and yield their leader.

    The other ranks are sent an end message when the body ends, and are killed when it fails. Raises `RankLostError` and
    `StartupError`.
    """
    leader = Leader(settings, device, starts_ranks=not place.started, expected=place.size)
    if place.size == 1:
        yield leader
        return
    async with AsyncExitStack() as stack:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1") if place.started else "127.0.0.1"
        tasks = await stack.enter_async_context(background())
        tasks.start_soon(report_absent_ranks, service, leader)
        hello = await _accept_ranks(leader, place, host, tasks)
        if not place.started:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-ranks-")))
            place = RankPlace(size=place.size, meets_at=f"file://{folder / 'store'}")
            await stack.enter_async_context(_started_ranks(leader, place, folder))
        timeout_s = settings.training.rank_timeout_s
        store = await anyio.to_thread.run_sync(meet, place, timeout_s)
        store.set(RANK_KEY, hello)
        with anyio.move_on_after(timeout_s):
            await leader.all_here(place.size)
        if len(leader.streams) + 1 < place.size:
            raise RankLostError(f"{len(leader.streams) + 1} of {place.size} ranks came within {timeout_s:g} s")
        given = (store, place, device, timeout_s, settings.training.collectives)
        leader.ranks = await in_thread(Ranks(0, place.size), open_process_group, *given)
        log.info("%d ranks train together; training.sharding is %s", place.size, settings.training.sharding)
        yield leader
        await leader.stop()


async def _accept_ranks(leader: Leader, place: RankPlace, host: str, tasks: TaskGroup) -> str:
    """Listen for the other ranks; return what they need to know to connect."""
    token = secrets.token_hex(16)

    async def accept(connection: SocketStream) -> None:
        async with connection:
            stream = RankStream(connection)
            try:
                hello = await stream.receive()
            except (*GONE, msgspec.DecodeError):
                return
            known = isinstance(hello, Hello) and hmac.compare_digest(hello.token.encode(), token.encode())
            if isinstance(hello, Hello) and known and 0 < hello.rank < place.size:
                await leader.listen(stream, hello.rank)

    listener = await anyio.create_tcp_listener(local_host=host, local_port=0)
    tasks.start_soon(listener.serve, accept)
    port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - anyio's
    return json.dumps({"host": host, "port": port, "token": token})


@asynccontextmanager
async def _started_ranks(leader: Leader, place: RankPlace, folder: Path) -> AsyncIterator[None]:
    """Run the other ranks as processes of this one, which writes their configuration into the private `folder`."""
    file = folder / "run.toml"
    file.write_text(leader.settings.run_file())
    children: list[Process] = []

    async def watch(rank: int, process: Process) -> None:
        code = await process.wait()
        if not leader.stopping:
            leader.lose(rank, "was killed" if code == -signal.SIGKILL else f"ended with code {code}", code)

    try:
        async with background() as tasks:
            for rank in range(1, place.size):
                own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": place.size, STORE_VARIABLE: folder / "store"}
                process = await anyio.open_process(
                    [sys.executable, "-P", "-m", "lachesis", "run", "trainer", "--config", str(file)],
                    stdin=subprocess.DEVNULL,
                    stdout=None,
                    stderr=None,
                    env=os.environ | {name: str(value) for name, value in own.items()},
                    start_new_session=True,
                )
                children.append(process)
                leader.pids[rank] = process.pid
                tasks.start_soon(watch, rank, process)
            try:
                yield
            except RankLostError:  # a collective noticed first; `watch` says which rank ended, and how
                with anyio.move_on_after(GRACE_S):
                    await anyio.sleep_forever()
                raise
            with anyio.move_on_after(_STOP_S):
                for process in children:
                    await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            for process in children:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.aclose()
