"""Reads a stream in order from a cursor, without acknowledgements, gaps or repeats.

Each time the connection or the consumer is lost, or the consumer's own numbers show a gap, a new ephemeral consumer is
made that starts behind the last message received. A consumer is deleted when it is no longer needed, and none is made
if there is nothing to read. In a cluster it may read from a replica that lags behind, so the leader says how far the
stream goes, never the consumer.
"""

import logging
import random
import secrets
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec
from nats.aio.msg import Msg

from lachesis.pipeline.bus import leader
from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.blobs import BlobStore
from lachesis.pipeline.bus.consumer_names import reader_description, reader_name, reader_names
from lachesis.pipeline.bus.consumer_pull import AckMetadata, ConsumerPull, weight
from lachesis.pipeline.bus.permissions import identity_in
from lachesis.pipeline.bus.replies import ConsumerInfo, NameTakenError, plain_headers
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.bus.server_waits import ServerWait
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.errors import DamagedError, HistoryLostError, InfrastructureError, NotFoundError
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.subjects import kind_of

__all__ = ["ReadOptions", "StreamReader", "read"]

log = logging.getLogger("lachesis")

_NS = 1_000_000_000
_MAX_MESSAGES = 512
_CREATE_S = 3.0  # then under another name: a server that died may have been chosen for it
_ASK_AGAIN_S = 0.5
_LOST_HISTORY_HINT = "the broker lost history that it had acknowledged, or its store was replaced by an older one"
_INACTIVE_S = 30.0  # the server forgets an ephemeral consumer that gets no pull for so long; it is made again
_ABANDON_S = 1.0  # to hand that word to the client, which takes no time unless its buffer is full
_ABANDONED_S = 0.001  # the same for one that is given up: no permission to delete is needed for it


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What `api.Bus.read` takes in addition to stream and filters."""

    start: int = 1
    headers_only: bool = False
    follow: bool = True
    max_bytes: int = 16 << 20
    gather_s: float = 0.0


class StreamReader:
    """See `api.Reader`."""

    def __init__(
        self,
        link: ServerLink,
        blobs: BlobStore,
        stream: str,
        filters: Sequence[str],
        options: ReadOptions,
    ) -> None:
        self._link = link
        self._blobs = blobs
        self._stream = stream
        self._kind = kind_of(stream)
        self._filters = list(filters)
        self._headers_only = options.headers_only
        self._follow = options.follow
        self._received = options.start - 1  # the last sequence received: where a new consumer goes on
        self._received_ns: int | None = None  # when it was stored; None: a reader before this one received it
        self._handed_out = options.start - 1
        self._target = 0  # the last sequence on the filters when it was opened
        self._name = ""
        self._config: dict[str, Any] | None = None  # of the newest consumer, which may exist without our knowing
        self._wait: ServerWait | None = None  # for a name
        self._consumer_seq = 0
        self._queued: deque[AckMetadata] = deque()  # of what the pull has queued
        self.pull = ConsumerPull(
            link,
            stream,
            ensure=self._create,
            accept=self._accept,
            max_messages=_MAX_MESSAGES,
            # the server counts whole messages even where it sends headers alone
            max_bytes=None if options.headers_only else options.max_bytes,
            gather_s=options.gather_s if options.follow else 0.0,
        )

    async def open(self) -> None:
        """Note how far the stream goes now. Raises `NotFoundError` when there is none, `HistoryLostError`."""
        self._target = await self._last()
        if self._target < self._received:
            await self._check_history()

    async def _last(self) -> int:
        found = [await self._last_on(subject) for subject in self._filters or [">"]]
        return max(message.seq if message else 0 for message in found)

    async def _last_on(self, subject: str) -> StoredMessage | None:
        try:
            return await leader.last(self._link, self._stream, subject)
        except DamagedError as error:
            log.warning("what cannot be read is passed over: %s", error)
            return await leader.last_readable(self._link, self._stream, subject)

    async def close(self) -> None:
        """Stop pulling, and have the server forget the consumer."""
        self._end_wait()
        await self.pull.stop()
        await self._abandon()

    async def _abandon(self) -> None:
        """Have the server forget the newest consumer. Nothing waits for it: `_INACTIVE_S` does it else."""
        config, self._config = self._config, None
        if config is None or not self._link.is_up:
            return
        request = {"stream_name": self._stream, "config": config | _forgotten_after(_ABANDONED_S), "action": "update"}
        with anyio.move_on_after(_ABANDON_S, shield=True), suppress(LachesisError):
            await self._link.send(
                f"$JS.API.CONSUMER.CREATE.{self._stream}.{config['name']}", msgspec.json.encode(request)
            )

    @property
    def has_to_pull(self) -> bool:
        """Whether anything can come: a read that does not follow may have been opened at the end."""
        return self._follow or not self.caught_up

    @property
    def caught_up(self) -> bool:
        return self._handed_out >= self._target

    def __aiter__(self) -> AsyncIterator[StoredMessage]:
        return self

    async def __anext__(self) -> StoredMessage:
        while not self.pull.queue:
            if not self._follow and self.caught_up:
                raise StopAsyncIteration
            if self.pull.idle and not self.caught_up:
                await self._ask_why()
            else:
                await self.pull.wait()
        msg = self.pull.queue[0]
        meta = self._queued[0]
        if not self._follow and self.caught_up:  # published since
            raise StopAsyncIteration
        message = StoredMessage(self._kind, msg.subject, meta.seq, msg.data, meta.time_ns, plain_headers(msg.headers))
        if LARGE_HEADER in message.headers and not self._headers_only:
            message = await self._blobs.join_or_mark(message)
        self.pull.queue.popleft()  # only now: a cancelled wait must not lose it
        self._queued.popleft()
        self.pull.release(weight(msg))
        self._handed_out = meta.seq
        return message

    async def _ask_why(self) -> None:
        """Nothing has come for long, but something should: it was deleted meanwhile, or this replica is stuck."""
        self.pull.idle = False
        self._target = min(self._target, await self._last())
        if not self.caught_up:
            self.pull.recreate()

    async def _check_history(self) -> None:
        """Raise `HistoryLostError` unless the stream still holds what was read of it.

        A broker whose disk was rolled back would give the sequences after it to other messages, and this reader would
        skip those. A leader that was cut off may answer from an old state for some seconds, so it is queried again.
        """
        seq, stored_ns = self._received, self._received_ns  # what is on its way from before may still arrive
        last = await self._end()
        asked_until = anyio.current_time() + leader.BELIEVE_LOSS_S
        while last < seq:
            if anyio.current_time() > asked_until:
                raise HistoryLostError(
                    f"stream {self._stream} ends at {last}, but {seq} was read already: {_LOST_HISTORY_HINT}"
                )
            await anyio.sleep(_ASK_AGAIN_S)
            last = await self._end()
        if stored_ns is None:
            return
        try:
            there = await leader.by_sequence(self._link, self._stream, seq)
        except NotFoundError:
            return  # trimmed
        if there.time_ns != stored_ns:
            raise HistoryLostError(
                f"stream {self._stream}: sequence {seq} is not what was read there: {_LOST_HISTORY_HINT}"
            )

    async def _end(self) -> int:
        return (await leader.state(self._link, self._stream)).last_seq

    async def _create(self) -> str:
        if self._received_ns is not None:
            await self._check_history()
        await self._abandon()
        client = str(self._link.nc.options.get("name") or "")
        suffix = secrets.token_hex(8)
        config = {
            "description": reader_description(client, self._filters, self._received + 1, suffix),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._received + 1,
            "ack_policy": "none",
            "replay_policy": "instant",
            "filter_subjects": self._filters,
            "headers_only": self._headers_only,
            "mem_storage": True,
            "num_replicas": 1,
            **_forgotten_after(_INACTIVE_S),
        }
        identity = identity_in(self._link.config.inbox_prefix)
        if identity is None:
            names = [reader_name(client, self._kind, self._filters, suffix)]
        else:
            names = reader_names(identity)
            random.shuffle(names)
        for name in names:
            try:
                await self._create_as(name, config)
            except NameTakenError:
                continue
            self._name = name
            self._consumer_seq = 0
            self._end_wait()
            return name
        text = f"{identity} has {len(names)} readers of {self._stream}, the most it may have: end some of its processes"
        if self._wait is None:
            self._wait = self._link.waits.begin(f"reader of {self._stream}", self._stream, text)
        raise InfrastructureError(text)

    async def _create_as(self, name: str, config: dict[str, Any]) -> None:
        """Make the consumer under `name`. Raises `NameTakenError`."""
        self._config = {"name": name, **config}
        try:
            await self._link.call_api(
                ConsumerInfo,
                f"$JS.API.CONSUMER.CREATE.{self._stream}.{name}",
                msgspec.json.encode({"stream_name": self._stream, "config": self._config, "action": "create"}),
                what=f"reader of {self._stream}",
                give_up_s=_CREATE_S,
            )
        except NameTakenError:
            self._config = None  # it is another reader's
            raise

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._link.waits.end(self._wait)
            self._wait = None

    def _accept(self, msg: Msg) -> bool:
        meta = AckMetadata.of(msg)
        if meta.consumer != self._name:
            return False  # of a consumer given up meanwhile
        if meta.consumer_seq != self._consumer_seq + 1 or meta.seq <= self._received:
            self.pull.recreate()
            return False
        self._consumer_seq = meta.consumer_seq
        self._received = meta.seq
        self._received_ns = meta.time_ns
        self._queued.append(meta)
        return True


def _forgotten_after(seconds: float) -> dict[str, Any]:
    """Return the part of a consumer's configuration that says how long the server keeps it without a request."""
    return {"inactive_threshold": int(seconds * _NS)}


@asynccontextmanager
async def read(reader: StreamReader) -> AsyncIterator[StreamReader]:
    """Run `reader` while the context is open."""
    await reader.open()
    async with background() as tasks:
        try:
            if reader.has_to_pull:
                await reader.pull.open()
                tasks.start_soon(reader.pull.run)
            yield reader
        finally:
            await reader.close()
