"""The NATS client with what the stock one leaves out: TLS that is never given up, hostile messages, a chosen server."""

import asyncio
import re
from typing import Any
from urllib.parse import ParseResult

import nats.errors
from nats.aio.client import Client, Server
from nats.protocol import parser

__all__ = ["NatsClient"]

# The server splits a line at blanks and tabs. The stock expressions split it at form feeds and vertical tabs too, which
# a subject may hold, and the client would lose its connection at each such message.
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n")


class NatsClient(Client):  # type: ignore[misc]  # untyped
    """The client, but it never speaks to a server without TLS where TLS was asked for, and no message makes it deaf.

    The stock one follows the server, even from `tls://`: whoever can answer in the server's place gets the token.
    """

    needs_tls = False
    _reconnect_to_server_handler: Any

    @property
    def server_id(self) -> str:
        """The id that the server it is connected to gave itself when it started."""
        return str(self._server_info.get("server_id", ""))

    async def move_to(self, server: ParseResult) -> None:
        """Connect to `server`, one of `servers`, in place of the present one. If that fails, to any other as ever."""

        def choose(servers: list[Server], _: object) -> tuple[Server | None, float]:
            self._reconnect_to_server_handler = None  # once
            return next((one for one in servers if one.uri.netloc == server.netloc), None), 0.0

        self._reconnect_to_server_handler = choose
        await self.force_reconnect()

    def _connect_command(self) -> bytes:  # what is sent first, at the first connection and at each one after
        if self.needs_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        command: bytes = super()._connect_command()
        return command

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

    async def _attempt_reconnect(self) -> None:
        """The stock client waits until its peer has taken in what is still unsent, which a dead one never does."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()


def _text(raw: bytes) -> bytes:
    """Return the bytes with what is no UTF-8 replaced."""
    return raw if raw.isascii() else raw.decode("utf-8", "replace").encode()
