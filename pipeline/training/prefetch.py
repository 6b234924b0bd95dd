"""Batches of the ledger for a trainer's loop, one ahead; and how it reaches the bus through outages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from lachesis.pipeline.bus.background import background
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.training.feed import BatchFeed, LedgerBatch
from lachesis.schemas.errors import InfrastructureError

__all__ = ["next_batch", "prefetch", "publish_with_retries"]

_IDLE_S = 10.0


async def prefetch(feed: BatchFeed, send: MemoryObjectSendStream[LedgerBatch]) -> None:
    """Send the feed's batches, for ever."""
    async with send, aclosing(feed.batches()) as batches:
        async for batch in batches:
            await send.send(batch)


async def next_batch(
    service: Service, receive: MemoryObjectReceiveStream[LedgerBatch], save_when_idle: Callable[[], Awaitable[None]]
) -> LedgerBatch | None:
    """Wait for a batch or for the drain, which gives None.

    A trainer that is kept waiting makes a checkpoint: history is held for the batches behind the last one, and where
    that fills a stream no further batch would ever come.
    """
    found: LedgerBatch | None = None
    done, saving = anyio.Event(), anyio.Lock()

    async def receive_one() -> None:
        nonlocal found
        try:
            found = await receive.receive()
        except anyio.EndOfStream:  # the fetching task has failed, and that ends the trainer
            await anyio.sleep_forever()
        done.set()

    async def end_on_drain() -> None:
        await service.draining.wait()
        done.set()

    async def save() -> None:
        await anyio.sleep(_IDLE_S)
        async with saving:
            await save_when_idle()

    async with background() as tasks:
        for task in (receive_one, end_on_drain, save):
            tasks.start_soon(task)
        await done.wait()
        await saving.acquire()  # what is being saved is finished first: a report cut off would fence its own writer
    return found


async def publish_with_retries(
    service: Service, drain_s: float, what: str, tell: Callable[[], Awaitable[None]]
) -> None:
    """Tell the bus something, however long that takes; once the service drains, for `drain_s` more.

    Raises `InfrastructureError` then: with the server gone as well, a drain would wait for it in vain and hold the
    checkpoints against the trainer's own next life, which tells what is on disk.
    """
    published = False

    async def give_up(scope: anyio.CancelScope) -> None:
        await service.draining.wait()
        await anyio.sleep(drain_s)
        scope.cancel()

    async with background() as tasks:
        tasks.start_soon(give_up, tasks.cancel_scope)
        await service.retrying(what)(tell)
        published = True
    if not published:
        raise InfrastructureError(f"{what}: the server was away while the trainer drained")
