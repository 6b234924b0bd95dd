"""`NatsBus`: the bus over NATS JetStream.

Each operation lives in a module of its own; here they share one link.

A stream's kind becomes here the server's name for the run's own stream; the modules below use that name.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import Self

from nats.aio.client import Client

from lachesis.pipeline.bus import consumers, key_watch, kv, request_reply, streams, trimming
from lachesis.pipeline.bus.api import (
    ConsumerLag,
    Delivery,
    Entry,
    PubAck,
    Reader,
    StoredMessage,
    StreamExtent,
    StreamUsage,
)
from lachesis.pipeline.bus.blobs import INLINE_BYTES, BlobStore, Fetch
from lachesis.pipeline.bus.config import Connection, StreamsConfig
from lachesis.pipeline.bus.diagnosis import explain
from lachesis.pipeline.bus.direct_get import DirectGetter
from lachesis.pipeline.bus.failover import Failover
from lachesis.pipeline.bus.leader import by_sequence
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.reader import ReadOptions, StreamReader, read
from lachesis.pipeline.bus.replies import ConsumerInfo, to_ns
from lachesis.pipeline.bus.reply_subjects import RefusedReplies
from lachesis.pipeline.bus.routing import MSG_ID_HEADER, stored_in
from lachesis.pipeline.bus.server_link import ServerLink
from lachesis.pipeline.bus.server_waits import ServerStall
from lachesis.pipeline.bus.stream_replicas import read_copy, renew_copies, servers_of
from lachesis.schemas.subjects import BUCKET, stream_name, value_subject

__all__ = ["NatsBus"]


class NatsBus:
    """Implements `api.Bus` for one run; made by `connection.connect`, closed with its context or by `close`."""

    def __init__(self, link: ServerLink, failover: Failover) -> None:
        self._link = link
        self._failover = failover
        self._publisher = Publisher(link)
        self._getter = DirectGetter(link)
        self._blobs = BlobStore(self._publisher, self._getter.fetch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection. Whatever waits, and every later call, raises `BusClosedError`."""
        await self._link.close()

    @property
    def run(self) -> str:
        """The run that the bus was opened for."""
        return self._link.run

    def _name(self, stream: str) -> str:
        return stream_name(self._link.run, stream)

    @property
    def client(self) -> Client:
        """The underlying client, for what the bus does not cover."""
        return self._link.nc

    @property
    def micro_client(self) -> request_reply.MicroClient:
        """Client for a service of the NATS micro protocol."""
        return request_reply.MicroClient(self._link)

    @property
    def server(self) -> tuple[str, int] | None:
        url = self._link.nc.connected_url
        return (url.hostname, url.port) if url and url.hostname and url.port else None

    @property
    def stall(self) -> ServerStall | None:
        return self._link.waits.stall

    @property
    def refusal(self) -> str:
        """How the server refuses credentials that it took before; empty if it does not."""
        return self._link.refusal

    def outlast_refusals(self) -> None:
        """Wait, as for a server that is away, where the server refuses the credentials that it took before."""
        self._link.nc.outlasts_refusal = True

    @property
    def unanswered(self) -> RefusedReplies:
        return self._link.unanswered

    @property
    def acknowledged(self) -> Mapping[str, int]:
        return self._link.acknowledged.newest

    def keep_acknowledged(self, folder: Path) -> None:
        """Keep what is acknowledged in a run's folder too: see `acknowledged`.

        So its loss is noticed after this process has ended, as well.
        """
        name = str(self._link.nc.options["name"])
        self._link.acknowledged.keep_in(folder, name.removeprefix(f"{self._link.run}."))

    @property
    def connection(self) -> Connection:
        """Settings with which another process connects to the same server under the same name."""
        return Connection(self._link.config, self._link.nc.options.get("token"))

    @property
    def reconnects(self) -> int:
        """How often the connection was lost since it was made."""
        return self._link.losses

    async def explain(self, stream: str) -> str:
        """Return why nothing of `stream` is answered, in words; takes a few seconds at most."""
        return await explain(self._link, self._name(stream))

    async def until_up(self) -> None:
        """Wait until there is a connection. Raises the failure where there will be none."""
        await self._link.wait_up()

    async def until_down(self) -> None:
        """Wait until the connection is lost. Raises the failure where there will be none again."""
        await self._link.wait_down()

    async def keep_served(self) -> None:
        """Leave a server that is cut off from its cluster, and spread the connections again; until cancelled.

        A process that keeps a connection for long runs this in a task beside its work.
        """
        await self._failover.run()

    async def ensure_streams(self, config: StreamsConfig) -> list[str]:
        """Create or change the run's streams and bucket; see `streams.ensure`."""
        return await streams.ensure(self._link, config)

    async def renew_copies(self, stream: str, copies: int) -> None:
        """Rebuild the copies of a stream, or of the bucket, from its leader's; see `copies.renew_copies`."""
        await renew_copies(self._link, self._name(stream), copies)

    async def servers_of(self, stream: str) -> list[str]:
        """Return the servers that hold a stream, or the bucket, its leader first; see `copies.servers_of`."""
        return await servers_of(self._link, self._name(stream))

    def read_copy(
        self, stream: str, server: str, *, start: int, headers_only: bool = False, limit: int | None = None
    ) -> AsyncGenerator[StoredMessage]:
        """Read what one server's copy holds of a stream, or of the bucket; see `copies.read_copy`."""
        name = self._name(stream)
        return read_copy(self._link, name, server, start=start, headers_only=headers_only, limit=limit)

    async def join(self, head: StoredMessage, fetch: Fetch) -> StoredMessage:
        """Return a large message whole, its chunks as `fetch` finds them; see `blobs.BlobStore.join`."""
        return await BlobStore(self._publisher, fetch).join(head)

    async def describe_streams(self) -> list[streams.StreamDescription]:
        """Return the run's streams, then its bucket, those of them that exist."""
        return await streams.describe(self._link)

    async def runs(self) -> list[str]:
        """Return the runs that have streams on the server."""
        return await streams.runs(self._link)

    async def reserved_bytes(self) -> dict[str, int]:
        """Return by run what its streams may hold together, bytes.

        Other streams of the account by their names.
        """
        return await streams.reserved_bytes(self._link)

    async def try_reservation(self, max_bytes: int, replicas: int) -> str | None:
        """Return why the server makes no stream of so many bytes, None if it does.

        See `streams.try_reservation`.
        """
        return await streams.try_reservation(self._link, max_bytes, replicas)

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream of the run, or its bucket, with all that it holds, if it is there."""
        await streams.delete(self._link, self._name(stream))
        self._link.acknowledged.forget(stream)

    async def stored_subjects(self, stream: str, filters: Sequence[str]) -> list[str]:
        """Return the subjects within `filters` that messages are on, in order.

        Raises `NotFoundError`: no stream.
        """
        return await streams.stored_subjects(self._link, self._name(stream), filters)

    async def missing(self, stream: str) -> list[tuple[int, int]] | None:
        """Return the sequences below the stream's last without a message: ranges (first, last), in order.

        None: there are too many to be listed.
        """
        return await streams.missing(self._link, self._name(stream))

    # -- writing -------------------------------------------------------------------------------------------------

    async def publish(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        stored_in(subject)
        return await self._publisher.store(subject, data, {**(headers or {}), MSG_ID_HEADER: msg_id})

    async def store_empty(self, subject: str, count: int) -> None:
        """Send `count` empty messages to a stream without waiting for the server.

        A message that is published next and acknowledged is stored after those of them that the server took.
        """
        stored_in(subject)
        for _ in range(count):
            await self._link.send(subject, b"")

    async def publish_large(
        self, subject: str, data: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        if len(data) <= INLINE_BYTES:
            return await self.publish(subject, data, msg_id=msg_id, headers=headers)
        stored_in(subject)
        return await self._blobs.store(subject, data, {**(headers or {}), MSG_ID_HEADER: msg_id})

    async def commit(
        self, subject: str, data: bytes, *, expected: int, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> int:
        return await self._publisher.commit(
            stored_in(subject), subject, data, expected=expected, headers={**(headers or {}), MSG_ID_HEADER: msg_id}
        )

    async def trim(self, stream: str, filters: Sequence[str], *, before: int) -> int:
        return await trimming.trim(self._link, self._publisher, self._blobs, self._name(stream), filters, before=before)

    async def delete_all(self, stream: str, filters: Sequence[str], *, keep: int = 0) -> None:
        """Delete all that is stored on each of `filters` but the newest `keep` messages.

        Without `keep` the last messages go too: only for subjects that are never written again.
        """
        await trimming.delete_all(self._link, self._name(stream), filters, keep=keep)

    async def consumer_names(self, stream: str) -> list[str]:
        """Return the names of a stream's consumers, or the bucket's, in order.

        Raises `NotFoundError`: no stream.
        """
        return await consumers.names(self._link, self._name(stream))

    async def forget(self, stream: str, durable: str) -> None:
        """Delete the consumer that the replicas of a stage share, if it is there, with all that it knows."""
        await consumers.forget(self._link, self._name(stream), durable)

    async def rewind(self, stream: str, durable: str, seq: int) -> None:
        """Deliver again to the replicas of a stage what is stored from sequence `seq` on.

        The consumer has to be there: see `consumer_names`.
        """
        await consumers.rewind(self._link, self._name(stream), durable, seq)

    async def delete_orphan_chunks(self, stream: str, *, before_ns: int, note: trimming.Note) -> int:
        return await trimming.delete_orphan_chunks(
            self._link, self._publisher, self._blobs, self._name(stream), self._link.run, before_ns=before_ns, note=note
        )

    # -- reading -------------------------------------------------------------------------------------------------

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        message = await self._publisher.last(self._name(stream), subject)
        return None if message is None else await self._blobs.join_or_mark(message)

    async def get(self, stream: str, seq: int) -> StoredMessage:
        return await self._blobs.join(await self._getter.get(self._name(stream), seq))

    async def get_head(self, stream: str, seq: int, *, leader: bool = False) -> StoredMessage:
        if leader or stream == BUCKET:  # no other server may be queried for their messages
            return await by_sequence(self._link, self._name(stream), seq)
        return await self._getter.get(self._name(stream), seq)

    async def fetch(
        self, stream: str, seqs: Sequence[int], subject: str | None = None
    ) -> AsyncGenerator[StoredMessage]:
        getter, name = self._getter, self._name(stream)
        found = getter.fetch(name, seqs) if subject is None else getter.fetch_among(name, seqs, subject)
        async with aclosing(found) as messages:
            async for message in messages:
                yield await self._blobs.join(message)

    def consume(
        self,
        stream: str,
        durable: str,
        filters: Sequence[str],
        *,
        max_messages: int = 64,
        max_bytes: int = 16 << 20,
        ack_wait_s: float = 30.0,
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        return consumers.consume(
            self._link,
            self._blobs,
            self._name(stream),
            durable,
            filters,
            max_messages=max_messages,
            max_bytes=max_bytes,
            ack_wait_s=ack_wait_s,
        )

    def read(
        self,
        stream: str,
        filters: Sequence[str],
        *,
        start: int = 1,
        headers_only: bool = False,
        follow: bool = True,
        max_bytes: int = 16 << 20,
        gather_s: float = 0.0,
    ) -> AbstractAsyncContextManager[Reader]:
        options = ReadOptions(start, headers_only, follow, max_bytes, gather_s)
        return read(StreamReader(self._link, self._blobs, self._name(stream), filters, options))

    async def lag(self, stream: str, durable: str) -> ConsumerLag:
        name = self._name(stream)
        subject = f"$JS.API.CONSUMER.INFO.{name}.{durable}"
        info = await self._link.call_api(ConsumerInfo, subject, b"", what=f"consumer {durable} of {name}")
        return ConsumerLag(info.num_pending, info.num_ack_pending, info.num_redelivered, info.ack_floor.stream_seq)

    async def usage(self, stream: str) -> StreamUsage:
        return streams.to_usage(await streams.stream_info(self._link, self._name(stream)))

    async def extent(self, stream: str, subject: str) -> StreamExtent:
        # the server counts what is on the subject after it looked how far the stream goes
        state = (await streams.stream_info(self._link, self._name(stream), {"subjects_filter": subject})).state
        return StreamExtent(state.last_seq, sum((state.subjects or {}).values()))

    async def server_time_ns(self) -> int:
        # of the bucket: an environment may not see what others store in the streams
        return to_ns((await streams.stream_info(self._link, self._name(BUCKET))).ts)

    # -- key-value -----------------------------------------------------------------------------------------------

    async def stored_keys(self) -> list[str]:
        prefix = value_subject(self._link.run, "")
        return [one.removeprefix(prefix) for one in await self.stored_subjects(BUCKET, [f"{prefix}>"])]

    async def put(self, key: str, value: bytes, *, revision: int | None = None) -> int:
        return await kv.put(self._publisher, self._link.run, key, value, revision=revision)

    async def value(self, key: str) -> Entry | None:
        return await kv.value(self._publisher, self._link.run, key)

    async def delete(self, key: str) -> None:
        await kv.delete(self._publisher, self._link.run, key)

    def watch(self, key: str) -> AbstractAsyncContextManager[AsyncIterator[Entry]]:
        return key_watch.watch(self._link, self._publisher, self._link.run, key)

    # -- not stored ----------------------------------------------------------------------------------------------

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        return await request_reply.request(self._link, subject, data, timeout_s)

    def serve(
        self, subject: str, handler: Callable[[bytes], Awaitable[bytes]], *, at_once: int = 1
    ) -> AbstractAsyncContextManager[None]:
        return request_reply.serve(self._link, subject, handler, at_once)

    async def broadcast(self, subject: str, data: bytes) -> None:
        await request_reply.broadcast(self._link, subject, data)

    def listen(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[AsyncIterator[StoredMessage]]:
        return request_reply.listen(self._link, subject, limit)
