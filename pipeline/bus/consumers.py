"""Competing consumers: a durable, explicitly acknowledged consumer, pulled by any number of replicas.

Guarantees that a replica holds `max_bytes` at most, or one larger message: a large one counts in full, not as its head.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec
from nats.aio.msg import Msg

from lachesis.pipeline.bus.api import Delivery, StoredMessage
from lachesis.pipeline.bus.blobs import BlobStore, claimed_size
from lachesis.pipeline.bus.consumer_names import durable_description
from lachesis.pipeline.bus.consumer_pull import AckMetadata, ConsumerPull, weight
from lachesis.pipeline.bus.replies import ConsumerInfo, ConsumerNames, DeleteAnswer, plain_headers
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import NotFoundError
from lachesis.schemas.subjects import kind_of

__all__ = ["consume", "forget", "names", "rewind"]

_NS = 1_000_000_000
_MAX_ACK_PENDING = 16_384  # what all replicas may hold together: 256 of them at 64 messages each


class _Delivery:
    """See `api.Delivery`. An acknowledgement that is lost with the connection only brings the message again."""

    def __init__(
        self, link: ServerLink, pull: ConsumerPull, reply: str, message: StoredMessage, *, attempt: int, size: int
    ) -> None:
        self.message = message
        self.attempt = attempt
        self._link = link
        self._pull = pull
        self._reply = reply
        self._size: int | None = size  # None: given back already

    async def ack(self) -> None:
        self._release()
        await self._link.send(self._reply, b"+ACK")

    async def nak(self, delay_s: float = 0.0) -> None:
        self._release()
        await self._link.send(self._reply, _nak_body(delay_s))

    async def in_progress(self) -> None:
        await self._link.send(self._reply, b"+WPI")

    def _release(self) -> None:
        if self._size is not None:
            self._pull.release(self._size)
            self._size = None


def _nak_body(delay_s: float) -> bytes:
    return b'-NAK {"delay": %d}' % int(delay_s * _NS) if delay_s > 0 else b"-NAK"


class _Deliveries:
    def __init__(self, link: ServerLink, pull: ConsumerPull, stream: str, blobs: BlobStore) -> None:
        self._link = link
        self._pull = pull
        self._kind = kind_of(stream)
        self._blobs = blobs

    def __aiter__(self) -> AsyncIterator[Delivery]:
        return self

    async def __anext__(self) -> Delivery:
        msg = await self._pull.first()
        meta = AckMetadata.of(msg)
        message = StoredMessage(self._kind, msg.subject, meta.seq, msg.data, meta.time_ns, plain_headers(msg.headers))
        size = weight(msg)
        if LARGE_HEADER in message.headers:
            whole = claimed_size(message.data)
            await self._pull.room_for(whole)
            message = await self._blobs.join_or_mark(message)
            self._pull.hold(whole)
            size += whole
        self._pull.queue.popleft()  # only now: a cancelled wait must not lose it, and what waits is kept alive
        return _Delivery(self._link, self._pull, msg.reply, message, attempt=meta.attempt, size=size)


@asynccontextmanager
async def consume(
    link: ServerLink,
    blobs: BlobStore,
    stream: str,
    durable: str,
    filters: Sequence[str],
    *,
    max_messages: int,
    max_bytes: int,
    ack_wait_s: float,
) -> AsyncIterator[AsyncIterator[Delivery]]:
    """See `api.Bus.consume`."""
    request = msgspec.json.encode(
        {
            "stream_name": stream,
            "config": {
                "durable_name": durable,
                "name": durable,
                "description": durable_description(durable),
                "deliver_policy": "all",
                "ack_policy": "explicit",
                "ack_wait": int(ack_wait_s * _NS),
                "max_deliver": -1,
                "max_ack_pending": _MAX_ACK_PENDING,
                "filter_subjects": list(filters),
                "replay_policy": "instant",
            },
        }
    )

    async def ensure() -> str:
        what = f"consumer {durable} of {stream}"
        await link.call_api(ConsumerInfo, f"$JS.API.CONSUMER.CREATE.{stream}.{durable}", request, what=what)
        return durable

    def accept(_: Msg) -> bool:
        return True

    pull = ConsumerPull(link, stream, ensure=ensure, accept=accept, max_messages=max_messages, max_bytes=max_bytes)

    async def keep_alive() -> None:
        """What waits in the queue counts as delivered: its timer must not run out before it is handed out."""
        while link.failure is None:
            await anyio.sleep(ack_wait_s / 3)
            for msg in list(pull.queue):
                if link.is_up:
                    await link.send(msg.reply, b"+WPI")

    await ensure()
    async with background() as tasks:
        try:
            await pull.open()
            tasks.start_soon(pull.run)
            tasks.start_soon(keep_alive)
            yield _Deliveries(link, pull, stream, blobs)
        finally:
            await pull.stop()
            with anyio.move_on_after(2, shield=True):
                while pull.queue and link.is_up:
                    await link.send(pull.queue.popleft().reply, b"-NAK")


async def names(link: ServerLink, stream: str) -> list[str]:
    """See `NatsBus.consumer_names`."""
    found: list[str] = []
    while True:
        body = msgspec.json.encode({"offset": len(found)})
        answer = await link.call_api(
            ConsumerNames, f"$JS.API.CONSUMER.NAMES.{stream}", body, what=f"consumers of {stream}"
        )
        found += answer.consumers or []
        if not answer.consumers or len(found) >= answer.total:
            return sorted(found)


async def forget(link: ServerLink, stream: str, durable: str) -> None:
    """See `NatsBus.forget`."""
    with suppress(NotFoundError):
        await link.call_api(
            DeleteAnswer, f"$JS.API.CONSUMER.DELETE.{stream}.{durable}", b"", what=f"consumer {durable} of {stream}"
        )


async def rewind(link: ServerLink, stream: str, durable: str, seq: int) -> None:
    """See `NatsBus.rewind`."""
    await link.call_api(
        ConsumerInfo,
        f"$JS.API.CONSUMER.RESET.{stream}.{durable}",
        msgspec.json.encode({"seq": seq}),
        what=f"consumer {durable} of {stream}",
    )
