"""A TCP connection that hands on what arrives as it arrives, instead of waking a task that reads it."""

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import TcpTransport

from lachesis.pipeline.bus.addresses import host_and_port

__all__ = ["Transport"]

_MAX_HANDSHAKE_BYTES = 1 << 20


class Transport(TcpTransport):  # type: ignore[misc]  # untyped
    """As the stock client's, whose handshake reads it line by line. After that `deliver_to` takes over.

    Its end under TLS is no reason for a warning of asyncio's.
    """

    _io_reader: "_Reader"
    _io_writer: Any

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: float) -> None:
        """Connect. Raises `OSError` and `TimeoutError` (`connect_timeout`: seconds)."""
        loop, reader = asyncio.get_running_loop(), _Reader(limit=_MAX_HANDSHAKE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        connecting = loop.create_connection(lambda: protocol, *host_and_port(uri))
        transport, _ = await asyncio.wait_for(connecting, connect_timeout)
        self._use(transport, protocol, reader)
        # a connection that goes over to TLS must not be collected with its first reader and writer
        self._bare_io_reader, self._bare_io_writer = self._io_reader, self._io_writer

    async def connect_tls(
        self, uri: ParseResult | str, ssl_context: Any, buffer_size: int, connect_timeout: float
    ) -> None:
        """Go over to TLS. Raises `OSError` and `TimeoutError` (`connect_timeout`: seconds)."""
        loop, reader = asyncio.get_running_loop(), _Reader(limit=_MAX_HANDSHAKE_BYTES)
        protocol = _TlsProtocol(reader)
        name = uri if isinstance(uri, str) else uri.hostname
        upgrade = loop.start_tls(self._io_writer.transport, protocol, ssl_context, server_hostname=name)
        self._use(await asyncio.wait_for(upgrade, connect_timeout), protocol, reader)

    def _use(self, transport: Any, protocol: asyncio.StreamReaderProtocol, reader: "_Reader") -> None:
        self._io_reader = reader
        self._io_writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())

    def deliver_to(self, receive: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        """Call `receive` with all that arrives from now on, and `ended` when nothing more will; see `at_eof`."""
        self._io_reader.deliver_to(receive, ended)

    @property
    def failure(self) -> BaseException | None:
        """Why the connection ended; None: it has not, or its peer closed it."""
        return self._io_reader.exception()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return int(self._io_writer.transport.get_write_buffer_size())

    def abort(self) -> None:
        """End the connection without waiting for its peer to take in what is unsent."""
        if self._io_writer is not None:  # else it has never connected
            self._io_writer.transport.abort()


class _Reader(asyncio.StreamReader):
    """Buffers what arrives, until somebody wants it at once."""

    _buffer: bytearray
    _receive: Callable[[bytes], None] | None = None
    _ended: Callable[[], None] | None = None

    def deliver_to(self, receive: Callable[[bytes], None], ended: Callable[[], None]) -> None:
        early = bytes(self._buffer)
        self._buffer.clear()
        self._receive, self._ended = receive, ended
        if early:
            receive(early)
        if self.at_eof() or self.exception() is not None:
            ended()

    def feed_data(self, data: bytes) -> None:  # type: ignore[override, unused-ignore]
        if self._receive is None:
            super().feed_data(data)
        else:
            self._receive(data)

    def feed_eof(self) -> None:
        super().feed_eof()
        if self._ended is not None:
            self._ended()

    def set_exception(self, exc: Exception) -> None:
        super().set_exception(exc)
        if self._ended is not None:
            self._ended()


class _TlsProtocol(asyncio.StreamReaderProtocol):
    """Once a peer under TLS has hung up, nothing can be written either: the connection is not kept half open."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False
