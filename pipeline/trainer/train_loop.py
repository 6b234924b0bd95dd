"""The loop of a trainer over the batches of the ledger, one fetched ahead, past outages of the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch

__all__ = ["prefetched_batches", "publish_with_retries", "train_batches"]

_IDLE_S = 10.0


async def train_batches(
    service: Service,
    feed: BatchFeed,
    *,
    step: Callable[[LedgerBatch], Awaitable[None]],
    save: Callable[[], Awaitable[None]],
    finished: Callable[[], bool],
) -> None:
    """Give each batch to `step`, the next one fetched meanwhile, until `finished` or the service drains.

    `save` makes the last steps durable: at the end, and when no batch comes for long.
    """
    async with prefetched_batches(feed) as batches:
        while not finished() and not service.draining.is_set():
            batch = await _next_batch(service, batches, save)
            if batch is None:
                break
            with service.vitals.working(len(batch.batch.groups)):
                await step(batch)
    await save()


@asynccontextmanager
async def prefetched_batches(feed: BatchFeed) -> AsyncIterator[MemoryObjectReceiveStream[LedgerBatch]]:
    """Yield a stream of the feed's batches; the next one is fetched ahead."""
    send, receive = anyio.create_memory_object_stream[LedgerBatch](1)

    async def fetch() -> None:
        async with send, aclosing(feed.batches()) as batches:
            async for batch in batches:
                await send.send(batch)

    with receive:
        async with background() as tasks:
            tasks.start_soon(fetch)
            yield receive


async def _next_batch(
    service: Service, receive: MemoryObjectReceiveStream[LedgerBatch], save: Callable[[], Awaitable[None]]
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

    async def save_when_idle() -> None:
        await anyio.sleep(_IDLE_S)
        async with saving:
            await save()

    async with background() as tasks:
        for task in (receive_one, end_on_drain, save_when_idle):
            tasks.start_soon(task)
        await done.wait()
        await saving.acquire()  # what is being saved is finished first: a report cut off would fence its own writer
    return found


async def publish_with_retries(
    service: Service, drain_s: float, what: str, publish: Callable[[], Awaitable[None]]
) -> None:
    """Publish, with retries until it succeeds; once the service drains, for `drain_s` more.

    Raises `InfrastructureError` then: if the server is gone as well, a drain would wait for it in vain and keep the
    trainer's next life, which reports what is on disk, from the checkpoints.
    """
    published = False

    async def give_up(scope: anyio.CancelScope) -> None:
        await service.draining.wait()
        await anyio.sleep(drain_s)
        scope.cancel()

    async with background() as tasks:
        tasks.start_soon(give_up, tasks.cancel_scope)
        await service.retrying(what)(publish)
        published = True
    if not published:
        raise InfrastructureError(f"{what}: the server was away while the trainer drained")
