"""Extends the stock NATS client: enforced TLS, robustness to hostile messages, a chosen server."""

import asyncio
import json
import re
import ssl
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client, Server
from nats.aio.transport import TcpTransport
from nats.protocol import parser

from lachesis.pipeline.bus.addresses import decoded_credentials
from lachesis.pipeline.bus.domains import in_domain, out_of_domain

__all__ = ["NatsClient", "is_refusal"]

_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
"""Where an authentication has merely timed out, the network or one of both stood still: the next may succeed."""


# The server splits a line at blanks and tabs. The stock expressions split it at form feeds and vertical tabs too, which
# a subject may hold, and the client would lose its connection at each such message.
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n")


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
    _reconnect_to_server_handler: Any
    _transport: Any

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
        await super()._connect_to_server(s)
        if type(self._transport) is TcpTransport:
            self._transport = _QuietTransport(self._transport)

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

    async def _send_publish(self, subject: str, *arguments: Any) -> None:
        await super()._send_publish(in_domain(subject, self.domain), *arguments)

    def out_of_domain(self, text: str) -> str:
        """Return what a server says of subjects, in lower case, as if there were no `domain`."""
        return out_of_domain(text, self.domain)

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """Headers need not be headers, which the stock client takes as badly. Without them no message is a rollout."""
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return None
        return parsed

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
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()


class _QuietTransport(TcpTransport):  # type: ignore[misc]  # untyped
    """As the stock one, but that its end under TLS is no reason for a warning of asyncio's."""

    _io_writer: Any

    def __init__(self, plain: TcpTransport) -> None:
        self.__dict__.update(vars(plain))

    async def connect_tls(
        self, uri: ParseResult | str, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: float
    ) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        protocol = _TlsProtocol(reader)
        name = uri if isinstance(uri, str) else uri.hostname
        upgrade = loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=name)
        transport: Any = await asyncio.wait_for(upgrade, connect_timeout)
        self._io_reader, self._io_writer = reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class _TlsProtocol(asyncio.StreamReaderProtocol):
    """Once a peer under TLS has hung up, nothing can be written either: the connection is not kept half open."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


def _text(raw: bytes) -> bytes:
    """Return the bytes with what is no UTF-8 replaced."""
    return raw if raw.isascii() else raw.decode("utf-8", "replace").encode()
