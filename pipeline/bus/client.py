"""Extends the stock NATS client: enforced TLS, no harm by hostile messages, less work a message.

The stock client wakes two tasks for a message that arrives and one for what is sent. Here messages reach their
reader within the call that takes them from the socket, and what is sent within a turn of the event loop is written
at once. Connection, authentication, TLS and reconnection stay the stock client's.
"""

import asyncio
import errno
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import ParseResult

import anyio
import nats.errors
from nats.aio.client import DEFAULT_BUFFER_SIZE, Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from lachesis.pipeline.bus.addresses import decoded_credentials, is_websocket
from lachesis.pipeline.bus.domains import in_domain, out_of_domain
from lachesis.pipeline.bus.protocol import Frame, FrameError, FrameReader, parse_headers
from lachesis.pipeline.bus.transport import Transport

__all__ = ["NatsClient", "hang_up", "is_refusal", "requested_cancellations"]

_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
"""Where an authentication has merely timed out, the network or one of both stood still: the next may succeed."""


def is_refusal(text: str) -> bool:
    """Return whether a server says that it does not take a client's credentials."""
    return any(refusal in text.lower() for refusal in _REFUSALS)


class NatsClient(Client):  # type: ignore[misc]  # untyped
    """The client, but it never speaks without TLS to a server if TLS is required, and no message stops its reading.

    The stock client follows the server, even from `tls://`: an impostor that answers in the server's place gets the
    token.
    """

    needs_tls = False
    outlasts_refusal = False
    """Whether it tries on where a server that took its credentials refuses them, instead of closing for good."""
    domain: str | None = None
    """JetStream domain that requests to JetStream's API go to; None: that of the connected server."""
    _error_cb: Any
    _flush_queue: Any
    _pending: list[bytes]
    _reconnect_to_server_handler: Any
    _transport: Any

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Msg], None]] = {}
        """By the number of their subscription, those that take a message within the call that reads it."""
        self._frames = FrameReader()
        self._left: deque[Frame | Exception] = deque()
        """What the reading task has to deal with, in order: all that is no message for a handler."""
        self._write_is_due = False

    @property
    def server_id(self) -> str:
        """The id that the server it is connected to gave itself when it started."""
        return str(self._server_info.get("server_id", ""))

    @property
    def has_jetstream(self) -> bool:
        """Whether the server it is connected to has JetStream, for whatever account."""
        return bool(self._server_info.get("jetstream"))

    @property
    def jetstream_domain(self) -> str | None:
        """The JetStream domain of the server it is connected to, None if that has none."""
        return self._server_info.get("domain") or None

    @property
    def is_clustered(self) -> bool:
        """Whether the server it is connected to is part of a cluster."""
        return bool(self._server_info.get("cluster"))

    @property
    def node_name(self) -> str:
        """Name of the connected server: its own name, or else host and port."""
        name = str(self._server_info.get("server_name", ""))
        if name and name != self.server_id:
            return name
        url = self.connected_url
        return f"{url.hostname}:{url.port}" if url is not None else "the server"

    async def _connect_to_server(self, s: Server) -> None:
        if is_websocket(s.uri.geturl()):
            await super()._connect_to_server(s)
            return
        s.last_attempt = time.monotonic()
        if isinstance(self._transport, Transport):  # of an attempt that failed
            self._transport.abort()
        self._transport = Transport()
        await self._transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def move_to(self, server: ParseResult) -> None:
        """Connect to `server`, one of `servers`, in place of the present one.

        If that fails, to any other as ever.
        """

        def choose(servers: list[Server], _: object) -> tuple[Server | None, float]:
            self._reconnect_to_server_handler = None  # once
            return next((one for one in servers if one.uri.netloc == server.netloc), None), 0.0

        self._reconnect_to_server_handler = choose
        await self.force_reconnect()

    def _connect_command(self) -> bytes:  # what is sent first, at the first connection and at each one after
        if self.needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        command: bytes = super()._connect_command()
        server = self._current_server
        if server is None or "%" not in server.uri.netloc or self._has_own_credentials():
            return command
        verb, _, fields = command.partition(b" ")
        return b" ".join([verb, json.dumps(json.loads(fields) | decoded_credentials(server.uri)).encode() + b"\r\n"])

    def _has_own_credentials(self) -> bool:
        """Whether those of the settings count, and not those in the address."""
        named = (self.options.get(name) is not None for name in ("user", "token"))
        return any(named) or self._signature_cb is not None

    def out_of_domain(self, text: str) -> str:
        """Return what a server says of subjects, in lower case, as if there were no `domain`."""
        return out_of_domain(text, self.domain)

    # -- what arrives --------------------------------------------------------------------------------------------

    async def hear(self, subject: str, handler: Callable[[Msg], None], queue: str = "") -> Subscription:
        """Subscribe; `handler` gets each message at once, from the event loop, and must not take long."""
        number = self._sid + 1
        self._handlers[number] = handler
        try:
            return await self.subscribe(subject, queue=queue)
        except BaseException:
            self._handlers.pop(number, None)
            raise

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        self._handlers.pop(sid, None)
        super()._remove_sub(sid, max_msgs)

    async def _read_loop(self) -> None:
        """Read one connection to its end; the stock client runs this as a task for each."""
        try:
            await self._read_from(self._transport)
        except nats.errors.UnexpectedEOF as error:
            await self._error_cb(error)
            await self._process_op_err(error)
        except OSError as error:
            await self._process_op_err(error)
        except (FrameError, ValueError):  # JSON and UTF-8 that are none are such
            await self._process_op_err(nats.errors.ProtocolError())

    async def _read_from(self, transport: Any) -> None:
        """Return when another connection takes the place of `transport`. Raises why it ended by itself."""
        self._frames, wake = FrameReader(), asyncio.Event()
        self._left.clear()

        def receive(data: bytes) -> None:
            if self._transport is transport and not self.is_closed and not self.is_reconnecting:
                self._take_in(data)
                if self._left:
                    wake.set()

        if isinstance(transport, Transport):
            transport.deliver_to(receive, wake.set)
        while not self.is_closed and not self.is_reconnecting:
            if isinstance(transport, Transport):
                await wake.wait()
                wake.clear()
            else:
                receive(await transport.read(DEFAULT_BUFFER_SIZE))
            while self._left:
                await self._deal_with(self._left.popleft())
            if isinstance(transport, Transport) and transport.failure is not None:
                raise transport.failure
            if transport.at_eof():
                raise nats.errors.UnexpectedEOF

    def _take_in(self, data: bytes) -> None:
        """Hand messages to their handlers; what else there is waits for the reading task."""
        try:
            for frame in self._frames.feed(data):
                handler = self._handlers.get(frame.sid)
                if handler is None:
                    self._left.append(frame)
                    continue
                headers = None if frame.header is None else parse_headers(frame.header)
                try:
                    handler(self._build_message(frame.sid, frame.subject, frame.reply, frame.data, headers))
                except Exception as error:  # noqa: BLE001 - of one message, which must not end the connection
                    self._left.append(error)
        except FrameError as error:
            self._left.append(error)

    async def _deal_with(self, received: Frame | Exception) -> None:
        if isinstance(received, FrameError):
            raise received
        if isinstance(received, Exception):
            await self._error_cb(received)
        elif received.sid:
            await self._process_msg(*received[:3], received.data, received.header)
        else:
            verb, _, text = received.data.partition(b" ")
            match verb.upper():
                case b"PING":
                    await self._process_ping()
                case b"PONG":
                    await self._process_pong()
                case b"INFO":
                    await self._process_info(json.loads(text))
                case b"-ERR":
                    await self._process_err(text.strip().decode().lower())
                case b"+OK":
                    pass
                case _:
                    raise FrameError(f"{received.data[:80]!r} is nothing that a server sends")

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        return parse_headers(headers) if headers else None

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        """Subjects need not be UTF-8, though the stock client ends its connection over one that is not, for ever."""
        return super()._build_message(sid, _text(subject), _text(reply), data, headers)

    async def _process_pong(self) -> None:
        """A flush may have been given up before its pong comes, at which the stock client ceases to read."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.Future()
        await super()._process_pong()

    async def _process_err(self, err_msg: str) -> None:
        """The stock client says of its own end by a refusal no more than that it is closed."""
        error = nats.errors.Error(f"nats: {err_msg}")
        refused = self.is_connected and is_refusal(err_msg)
        if refused:
            await self._error_cb(error)
        if refused and self.outlasts_refusal:
            await self._process_op_err(error)
        else:
            await super()._process_err(err_msg)

    async def _attempt_reconnect(self) -> None:
        """The stock client waits until its peer has taken in what is still unsent, which a dead one never does."""
        if isinstance(self._transport, Transport):
            self._transport.abort()
        await super()._attempt_reconnect()

    # -- what is sent --------------------------------------------------------------------------------------------

    async def _send_publish(self, subject: str, *arguments: Any) -> None:
        await super()._send_publish(in_domain(subject, self.domain), *arguments)

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        """The stock client's overtakes what was sent before, so its answer says nothing of that."""
        self._write_pending()
        await super()._send_ping(future)

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if force_flush or not isinstance(self._transport, Transport):
            return await super()._flush_pending(force_flush)
        if not self._write_is_due:
            self._write_is_due = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return None

    def _write_pending(self) -> None:
        """Write all that was sent in this turn of the event loop."""
        self._write_is_due = False
        if not self.is_connected or not isinstance(self._transport, Transport):
            return
        if self._transport.unsent_bytes:  # the server is slow: the stock client's task waits for it
            if self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.Future())
            return
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        if pending:
            self._transport.writelines(pending)


def _text(raw: bytes) -> bytes:
    """Return the bytes with what is no UTF-8 replaced."""
    return raw if raw.isascii() else raw.decode("utf-8", "replace").encode()


async def hang_up(nc: Client, within_s: float) -> None:
    """Close a client's connection, which may be going at that moment.

    The client writes what it still holds first.

    An attempt to reconnect that survives its cancellation, as it does where it fails in the same moment (`wait_for` of
    Python 3.11), gives up by itself: it would go on for ever, and keep the process from ending.
    """
    nc.options.update(allow_reconnect=False, max_reconnect_attempts=1)
    with anyio.move_on_after(within_s, shield=True), suppress(OSError), requested_cancellations():
        await nc.close()


@contextmanager
def requested_cancellations() -> Iterator[None]:
    """Raise `ConnectionAbortedError` in place of a cancellation that was not requested.

    A client whose connection ends cancels what it waits for itself. Its caller's task would end as if it had been
    cancelled, and no cancel scope would know why.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling() > 0:
            raise
        raise ConnectionAbortedError(errno.ECONNABORTED, "the connection ended meanwhile") from error
