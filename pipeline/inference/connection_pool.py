"""Keeps a client's connections to one server: the one that was used last is used next.

httpx looks at every connection of its pool before and after each request, which with a few dozen of them costs several
times what the request itself does. Here connections are httpcore's own, without its pool. Guarantees that there are
never more than `max_connections` of them, that a request waits for one in the order in which it came, that one which
was not used for a while is closed, and that one which its server has closed gets no request.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import httpcore
import httpx

from lachesis.pipeline.common.tls import tls_context

__all__ = ["ConnectionPool"]

_IDLE_S = 60.0
"""Seconds after which a connection that is not used is closed. The reference server keeps it for 75 s. vLLM closes it
earlier, which is noticed before a request is sent. Each new connection costs a comparison of the server
(`IdentityGuard`), so those of agents that work for some seconds between two calls are kept."""
_FAILURES = (
    httpcore.NetworkError,
    httpcore.ProtocolError,
    httpcore.TimeoutException,
    httpcore.UnsupportedProtocol,
)


class ConnectionPool(httpx.AsyncBaseTransport):
    """The connections to one server, without a proxy. Responses must be closed, as `AsyncClient.stream` does."""

    def __init__(
        self, max_connections: int, *, trust_env: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`trust_env`: see `tls_context`."""
        self._ssl = tls_context(trust_env=trust_env)
        self._room = anyio.Semaphore(max_connections)
        self._idle = deque[tuple[float, httpcore.AsyncHTTPConnection]]()
        """Since when it is not used, and the connection; the one used last is at the end."""
        self._clock = clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        await self._close_unused()
        await self._room.acquire()
        connection: httpcore.AsyncHTTPConnection | None = None
        try:
            url = httpcore.URL(
                scheme=request.url.raw_scheme,
                host=request.url.raw_host,
                port=request.url.port,
                target=request.url.raw_path,
            )
            connection = await self._connection(url.origin)
            sent = httpcore.Request(
                request.method, url, headers=request.headers.raw, content=request.stream, extensions=request.extensions
            )
            with _as_httpx():
                answer = await connection.handle_async_request(sent)
        except BaseException:
            self._put_back(connection)
            raise
        body = _Body(answer.aiter_stream, answer.aclose, lambda: self._put_back(connection))
        return httpx.Response(answer.status, headers=answer.headers, stream=body, extensions=answer.extensions)

    async def aclose(self) -> None:
        """Close all connections."""
        while self._idle:
            await self._idle.popleft()[1].aclose()

    async def _connection(self, server: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            _, connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(server, ssl_context=self._ssl)

    def _put_back(self, connection: httpcore.AsyncHTTPConnection | None) -> None:
        """Give up the place of a connection, which another request may use unless it was closed."""
        if connection is not None and connection.is_available():
            self._idle.append((self._clock(), connection))
        self._room.release()

    async def _close_unused(self) -> None:
        while self._idle and self._idle[0][0] < self._clock() - _IDLE_S:
            await self._idle.popleft()[1].aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer: `parts`, which `close` ends. `closed` is called then, however that ends."""

    def __init__(
        self, parts: Callable[[], AsyncIterator[bytes]], close: Callable[[], Awaitable[None]], closed: Callable[[], Any]
    ) -> None:
        self._parts = parts
        self._close = close
        self._closed: Callable[[], Any] | None = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _as_httpx():
            async for part in self._parts():
                yield part

    async def aclose(self) -> None:
        try:
            await self._close()
        finally:
            if self._closed is not None:
                self._closed()
                self._closed = None


@contextmanager
def _as_httpx() -> Iterator[None]:
    """Raise httpcore's errors as those of httpx, which have the same names."""
    try:
        yield
    except _FAILURES as error:
        raise getattr(httpx, type(error).__name__)(str(error)) from error
