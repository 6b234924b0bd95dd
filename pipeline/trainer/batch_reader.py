"""`lachesis.batches`: the batches of a run as packed tensors, for a trainer of your own.

    async with lachesis.batches("run", nats="nats://127.0.0.1:4222") as batches:
        async for batch in batches:
            ...                                       # train on batch.packed
            version = await batch.publish(model, tokenizer, "weights")
            await batch.commit(policy_version=version, checkpoint="checkpoints/17")

Batches come in the order of the ledger, whose chain is verified; the next one is fetched meanwhile. Iteration begins
after the batch committed last, or at `position`. Guarantees that what was committed never comes again under the same
trainer's name, and that of two trainers under one name the one that wrote first goes on (`FencedError` for the other).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.connection import connect, for_identity
from lachesis.pipeline.bus.embedded import read_endpoint
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.tokenizer_hash import probe_of
from lachesis.pipeline.common.trainability import TEXT_ALONE, TrainerLimits
from lachesis.pipeline.errors import CheckpointError, leaves
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.model.tensors import policy_tensors, vocabulary_of
from lachesis.pipeline.model.tokenizer import tokenizer_hash
from lachesis.pipeline.model.weight_files import write_new_weights
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import GroupDrops, TrainReport, VoidBatch

__all__ = ["BatchReader", "FetchedBatch", "LedgerPosition", "batches"]

log = logging.getLogger("lachesis")


def batches(
    run: str,
    *,
    nats: str | ConnectionConfig | Bus | None = None,
    folder: str | Path | None = None,
    trainer: str = "main",
    position: LedgerPosition | None = None,
    pad_id: int = 0,
) -> BatchReader:
    """Return the batches of `run`.

    Iterate them as they are, or open them first (`async with`) to publish weights.

    `nats` is a server's URL, a connection's settings or an open bus; left out, the run's embedded server is found by
    its folder (default `runs/<run>`). `trainer` names the ledger. `position` takes precedence over the committed one.
    `pad_id` fills up the rows of the tensors.
    """
    return BatchReader(run, nats, Path(folder or f"runs/{run}"), trainer=trainer, position=position, pad_id=pad_id)


class BatchReader:
    """See `batches`. Iterating ends only with an error or with the loop around it."""

    def __init__(
        self,
        run: str,
        nats: str | ConnectionConfig | Bus | None,
        folder: Path,
        *,
        trainer: str,
        position: LedgerPosition | None,
        pad_id: int,
    ) -> None:
        self.run = run
        self.pad_id = pad_id
        self.lineage = os.urandom(3).hex()
        """Names this training attempt in policy versions."""
        self._nats = nats
        self._folder = folder
        self._trainer = trainer
        self._position = position
        self._feed: BatchFeed | None = None
        self._open = contextlib.AsyncExitStack()
        self._voids: list[VoidBatch] = []
        self._drops: list[GroupDrops] = []

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            bus = await self._bus(stack)
            term = f"{os.getpid()}-{self.lineage}"
            self._feed = await BatchFeed.open(bus, self.run, self._trainer, term=term)
            if self._position is not None:
                self._feed.position = self._position
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._feed = None
        await self._open.aclose()

    async def _bus(self, stack: contextlib.AsyncExitStack) -> Bus:
        name = f"{self.run}.trainer-{self._trainer}"
        match self._nats:
            case None:
                endpoint = read_endpoint(self._folder / "nats")
                bus = await connect(endpoint.url, run=self.run, name=name, token=endpoint.token)
            case str() as url:
                bus = await connect(url, run=self.run, name=name)
            case ConnectionConfig() as config:
                bus = await connect(run=self.run, name=name, config=for_identity(config, "trainer"))
            case given:
                return given
        bus.keep_acknowledged(self._folder)
        await stack.enter_async_context(bus)
        tasks = await stack.enter_async_context(background())
        tasks.start_soon(bus.keep_served)
        return bus

    @property
    def feed(self) -> BatchFeed:
        if self._feed is None:
            raise RuntimeError("the batches are not open: use them inside `async with` or within the loop over them")
        return self._feed

    @property
    def committed(self) -> TrainReport | None:
        """The last commit, None before the first: its step, checkpoint and policy version."""
        return self.feed.report

    async def publish(self, model: Any, tokenizer: Any, folder: str | Path) -> str:
        """Publish the weights to begin with; see `FetchedBatch.publish`."""
        return await self.publish_step(model, tokenizer, folder, self.committed.next_batch if self.committed else 0)

    async def publish_step(self, model: Any, tokenizer: Any, folder: str | Path, step: int) -> str:
        """Publish the weights after `step` batches."""
        tensors = policy_tensors(model)
        version, path = await write_when_room(
            Path(folder),
            lambda: write_new_weights(tensors, Path(folder).absolute(), step, self.lineage),
            needed_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        )
        probe = probe_of(tokenizer, vocabulary_of(model))
        await self.feed.publish_weights(version, str(path), tokenizer_hash(tokenizer), vocabulary_of(model), probe)
        return str(version)

    async def commit(self, batch: LedgerBatch, *, step: int, policy_version: str, checkpoint: str) -> None:
        """See `FetchedBatch.commit`."""
        committed = self.committed
        if committed is not None and committed.ledger_index >= batch.entry.index:
            raise CheckpointError(f"batch {batch.batch.number} was committed already, with step {committed.step}")
        self.feed.mark_trained(batch)
        await self.feed.report_trained(
            policy_version=policy_version,
            step=step,
            next_batch=batch.batch.number + 1,
            lineage=PolicyVersion.parse(policy_version).lineage,
            checkpoint=checkpoint,
            voids=[void for void in self._voids if void.batch <= batch.batch.number],
            drops=[drops for drops in self._drops if drops.batch <= batch.batch.number],
        )
        self._voids = [void for void in self._voids if void.batch > batch.batch.number]
        self._drops = [drops for drops in self._drops if drops.batch > batch.batch.number]

    def void(self, batch: LedgerBatch, reason: str) -> None:
        """See `FetchedBatch.void`."""
        self._voids.append(VoidBatch(batch.batch.number, reason))
        self._drops = [drops for drops in self._drops if drops.batch != batch.batch.number]

    def limits(self, batch: LedgerBatch) -> TrainerLimits:
        """Return the limits of the packed tensors: the run's policy's, else those of most of its groups."""
        if self.feed.policy is not None:
            return TrainerLimits.of(self.feed.policy, TEXT_ALONE)
        hashes = Counter(group.tokenizer_hash for _, group, _ in batch.groups)
        return TrainerLimits(hashes.most_common(1)[0][0] if hashes else None)

    def drop(self, batch: LedgerBatch, selected: TrainableBatch) -> None:
        """Record the groups that `FetchedBatch.packed` leaves out, for the commit that covers the batch."""
        drops = selected.drops(batch.batch.number)
        for drop in drops:
            log.warning("batch %d lacks %d of its groups: %s", drop.batch, len(drop.seqs), drop.reason)
        self._drops += drops

    def __aiter__(self) -> AsyncIterator[FetchedBatch]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[FetchedBatch]:
        send, receive = anyio.create_memory_object_stream[FetchedBatch](0)
        # A task of its own holds what is open, so that the loop may be left in any way and from anywhere.
        reading = asyncio.create_task(self._read(send))
        try:
            with receive:
                async for batch in receive:
                    yield batch
            error = await reading
            if error is not None:
                raise error
        finally:
            reading.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([reading])

    async def _read(self, send: MemoryObjectSendStream[FetchedBatch]) -> LachesisError | BaseExceptionGroup | None:
        """Send batches until an error, which is returned: a loop that was left never asks for it, so it is no news."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(send)
                if self._feed is None:
                    await stack.enter_async_context(self)
                async for fed in await stack.enter_async_context(contextlib.aclosing(self.feed.batches())):
                    await send.send(FetchedBatch(self, fed))
        except (LachesisError, BaseExceptionGroup) as error:
            if all(isinstance(leaf, LachesisError) for leaf in leaves(error)):
                return error
            raise
        return None


class FetchedBatch:
    """One batch. `number` counts from 0 without gaps, so `number + 1` batches are trained once this one is."""

    def __init__(self, owner: BatchReader, fed: LedgerBatch) -> None:
        self._owner = owner
        self.fed = fed
        """Ledger entry, manifest, groups and teacher arrays. `with_texts()` of a group unpacks its texts."""

    @property
    def number(self) -> int:
        return self.fed.batch.number

    @property
    def position(self) -> LedgerPosition:
        """The position after this batch: keep it with your own checkpoint, and resume at it."""
        return LedgerPosition(self.fed.entry.index + 1, self.fed.entry.digest())

    @cached_property
    def packed(self) -> PackedBatch:
        """The tensors, one row a sequence, of the groups that can be used.

        `dropped` names the others, and the commit records them. Raises `DataError` when none can be: then `void` the
        batch.
        """
        self._owner.drop(self.fed, self._selected)
        return pack(self._selected.sequences, pad_id=self._owner.pad_id)

    @property
    def dropped(self) -> dict[str, str]:
        """By group id, why the group is not in `packed`.

        A token id that the model does not know, an image, a per-token column, a payload that is gone. Raises
        `DataError` as `packed`.
        """
        names = {ref.seq: ref.group for ref in self.fed.batch.groups}
        return {names[seq]: reason for seq, reason in self._selected.dropped.items()}

    @cached_property
    def _selected(self) -> TrainableBatch:
        return self.fed.select(self._owner.limits(self.fed))

    async def publish(self, model: Any, tokenizer: Any, folder: str | Path) -> str:
        """Write the model's weights into `folder`, make them the run's policy and return the version's name.

        Inference servers load them; they must be able to read the folder. Raises `FencedError`.
        """
        return await self._owner.publish_step(model, tokenizer, folder, self.number + 1)

    async def commit(self, *, policy_version: str, checkpoint: str, step: int | None = None) -> None:
        """Say that this batch and all before it are durably trained: call it once `checkpoint` is on disk.

        `policy_version` names its weights, `step` (default `number + 1`) your optimizer step. Raises `FencedError` when
        another trainer of this name has committed, `CheckpointError` when this batch or a later one was committed.
        """
        step = self.number + 1 if step is None else step
        await self._owner.commit(self.fed, step=step, policy_version=policy_version, checkpoint=checkpoint)

    def void(self, reason: str) -> None:
        """Record that this batch cannot be trained; the next commit carries it."""
        self._owner.void(self.fed, reason)
