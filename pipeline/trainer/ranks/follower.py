"""A rank of a trainer other than 0: trains its share of each batch that rank 0 names.

It writes nothing and reports nothing. Guarantees that it ends, at once, when rank 0 does, however that happens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import anyio.to_thread
import msgspec
import torch
from anyio.streams.memory import MemoryObjectReceiveStream

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import LedgerError, OutOfMemoryError, StartupError
from lachesis.pipeline.model.device import prepare_device
from lachesis.pipeline.trainer.collectives import Ranks
from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.gather import gather_optimizer
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.ranks.absent import ALIVE_S
from lachesis.pipeline.trainer.ranks.join import RankStart, join_as_follower
from lachesis.pipeline.trainer.ranks.leader import EXIT_NO_MEMORY, EXIT_RANK_LOST, RANK_KEY
from lachesis.pipeline.trainer.ranks.messages import (
    GONE,
    Alive,
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
from lachesis.pipeline.trainer.ranks.place import RankPlace, rank_device
from lachesis.pipeline.trainer.ranks.process_group import GRACE_S, end_process, in_thread, meet, open_process_group
from lachesis.pipeline.trainer.train_batch import train_batch
from lachesis.pipeline.trainer.train_loop import prefetched_batches
from lachesis.schemas.errors import DataError

__all__ = ["follow_leader"]

log = logging.getLogger("lachesis")


async def follow_leader(bus: Bus, training: TrainingConfig, place: RankPlace) -> None:
    """Do what rank 0 says until it says to stop; ends the process where rank 0 has gone.

    Raises `LedgerError` where this rank reads another ledger than rank 0, and `StartupError`.
    """
    setting = rank_device(training, place, torch.cuda.device_count())
    device = prepare_device(setting, training.threads, deterministic=training.deterministic)
    timeout_s = training.rank_timeout_s
    store = await anyio.to_thread.run_sync(meet, place, timeout_s)
    known = json.loads(await anyio.to_thread.run_sync(store.get, RANK_KEY))
    try:
        connection = await anyio.connect_tcp(known["host"], known["port"])
    except OSError as error:
        raise StartupError(f"rank {place.rank} cannot reach rank 0 at {known['host']}:{known['port']}") from error
    async with connection, _messages(RankStream(connection), place, known["token"]) as (stream, messages):
        given = (store, place, device, timeout_s, training.collectives)
        ranks = await in_thread(Ranks(place.rank, place.size), open_process_group, *given)
        joined = await messages.receive()
        if not isinstance(joined, JoinRun):
            raise StartupError(f"rank 0 began with {type(joined).__name__}: is it of another build?")
        learner = await in_thread(ranks, join_as_follower, joined.start, ranks, device)
        log.info("rank %d of %d joined at step %d", ranks.rank, ranks.size, learner.steps)
        await _train(bus, joined.start, learner, stream, messages)


@asynccontextmanager
async def _messages(
    stream: RankStream, place: RankPlace, token: str
) -> AsyncIterator[tuple[RankStream, MemoryObjectReceiveStream[Message]]]:
    """Yield the messages of rank 0. The process ends with it, also in the middle of a collective."""
    send, receive = anyio.create_memory_object_stream[Message](16)

    async def listen() -> None:
        try:
            while True:
                message = await stream.receive()
                if isinstance(message, Stop):
                    end_process(0)
                await send.send(message)
        except (*GONE, msgspec.DecodeError):
            log.warning("rank 0 of the trainer has gone: this one ends")
            end_process(EXIT_RANK_LOST)

    async def send_alive() -> None:
        with suppress(*GONE):  # what listens finds out
            while True:
                await stream.send(Alive())
                await anyio.sleep(ALIVE_S)

    with send, receive:
        with suppress(*GONE):  # what listens finds out
            await stream.send(Hello(place.rank, token))
        async with background() as tasks:
            tasks.start_soon(listen)
            tasks.start_soon(send_alive)
            yield stream, receive


async def _train(
    bus: Bus, start: RankStart, learner: Learner, stream: RankStream, messages: MemoryObjectReceiveStream[Message]
) -> None:
    feed = BatchFeed(bus, start.run, start.training.name, term=f"rank-{learner.ranks.rank}")
    feed.position, feed.ranks = start.position, (learner.ranks.rank, learner.ranks.size)
    async with prefetched_batches(feed) as batches:
        async for message in messages:
            match message:
                case TrainNext():
                    await _train_next(message, await batches.receive(), start, learner, stream)
                case GatherOptimizer():
                    await in_thread(learner.ranks, gather_optimizer, learner)
                    learner.gathered = None


async def _train_next(
    named: TrainNext, batch: LedgerBatch, start: RankStart, learner: Learner, stream: RankStream
) -> None:
    if (batch.entry.index, batch.entry.digest()) != (named.index, named.digest):
        raise LedgerError(
            f"rank {learner.ranks.rank} reads entry {batch.entry.index} of the ledger, {batch.entry.digest()[:12]}, "
            f"where rank 0 has entry {named.index}, {named.digest[:12]}: do all ranks name the same server?"
        )
    with suppress(*GONE):  # what listens finds out
        await stream.send(Fetched(named.index))

    def train() -> None:
        train_batch(learner, batch, start.limits, pad_id=start.pad_id, shuffle_seed=start.shuffle_seed)

    try:
        await in_thread(learner.ranks, train)
    except DataError:  # rank 0 says so, and counts the step as void
        learner.steps = batch.batch.number + 1
    except OutOfMemoryError as error:
        log.error("rank %d: %s", learner.ranks.rank, error)  # noqa: TRY400 - its text says all
        if learner.sharded is None:  # where all ranks raise the same, rank 0 ends meanwhile, and this process with it
            await anyio.sleep(GRACE_S)
        with suppress(*GONE):  # rank 0 waits in a collective
            await stream.send(NoMemory(str(error)))
        end_process(EXIT_NO_MEMORY)
