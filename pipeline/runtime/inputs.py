"""Merges the inputs of a stateful stage into bursts, so that one commit covers what came together.

Guarantees bounded memory: the burst in hand and what is read ahead hold `most` messages and `max_bytes` bytes each, or
one larger message, and one message a source that waits for room.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.window import InFlightWindow
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.runtime.service import Service

__all__ = ["InputSource", "open_bursts", "read_to_end"]

_OVERHEAD_BYTES = 256  # approximate bytes of a message in addition to its data: headers alone have none


@dataclass(frozen=True, slots=True)
class InputSource:
    """What to read: `start` is the first sequence wanted; `gather_s` as in `bus.api.Bus.read`."""

    stream: str
    filters: Sequence[str]
    start: int
    headers_only: bool = False
    gather_s: float = 0.0


@asynccontextmanager
async def open_bursts(
    service: Service, sources: Sequence[InputSource], *, most: int = 256, max_bytes: int = 16 << 20
) -> AsyncIterator[AsyncIterator[list[StoredMessage]]]:
    """Yield an iterator of bursts.

    A burst is what the sources have ready: at least one message, at most `most` messages and `max_bytes` bytes. A
    message larger than that comes alone.

    The time between two bursts counts as work, the wait for one does not. Each source keeps its stream's order; between
    sources there is none. The iterator ends when the service drains: the burst in hand is finished, what was read ahead
    (as much again, and one message a source) is dropped.
    """
    send, receive = anyio.create_memory_object_stream[StoredMessage](most)
    ahead = InFlightWindow(max_bytes, most)
    service.vitals.slots = (service.vitals.slots or 0) + 1

    async def feed(source: InputSource, out: MemoryObjectSendStream[StoredMessage]) -> None:
        async with (
            out,
            service.bus.read(
                source.stream,
                source.filters,
                start=source.start,
                headers_only=source.headers_only,
                gather_s=source.gather_s,
            ) as messages,
        ):
            async for message in messages:
                await ahead.enter(_weight(message))
                await out.send(message)

    async def feed_until_drained() -> None:
        async with send, service.until_drained(), anyio.create_task_group() as feeds:
            for source in sources:
                feeds.start_soon(feed, source, send.clone())

    with receive:
        async with background() as tasks:
            tasks.start_soon(feed_until_drained)
            yield _bursts(service, receive, ahead)


async def _bursts(
    service: Service, receive: MemoryObjectReceiveStream[StoredMessage], ahead: InFlightWindow
) -> AsyncIterator[list[StoredMessage]]:
    async for first in receive:
        burst = [first]
        while True:  # what was read ahead fits into one burst, and nothing joins it meanwhile
            try:
                burst.append(receive.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
        for message in burst:
            ahead.release(_weight(message))
        if service.draining.is_set():
            return
        with service.vitals.working(len(burst)):
            yield burst


async def read_to_end(
    service: Service, source: InputSource, handle: Callable[[StoredMessage], Awaitable[None]]
) -> None:
    """Give `handle` each message that is stored now; after an outage, those that it has not had."""
    start = source.start
    async for attempt in service.retrying(f"read {source.stream}"):
        with attempt:
            async with service.bus.read(
                source.stream, source.filters, start=start, headers_only=source.headers_only, follow=False
            ) as messages:
                async for message in messages:
                    await handle(message)
                    start = message.seq + 1


def _weight(message: StoredMessage) -> int:
    return len(message.data) + _OVERHEAD_BYTES
