"""Keeps a client's connections to one server: the one that was used last is used next.

httpx looks at every connection of its pool before and after each request, which with a few dozen of them costs several
times what the request itself does. Here each connection is a pool of its own. Guarantees that there are never more than
`max_connections` of them, that a request waits for one in the order in which it came, and that one which was not used
for a while is closed.
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable

import anyio
import httpx

from lachesis.pipeline.common.tls import tls_context

__all__ = ["ConnectionPool"]

_IDLE_S = 60.0
"""Seconds after which a connection that is not used is closed. The reference server keeps it for 75 s. vLLM closes it
earlier, which is noticed before a request is sent. Each new connection costs a comparison of the server
(`IdentityGuard`), so those of agents that work for some seconds between two calls are kept."""


class ConnectionPool(httpx.AsyncBaseTransport):
    """The connections to one server, without a proxy. Responses must be closed, as `AsyncClient.stream` does."""

    def __init__(
        self, max_connections: int, *, trust_env: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`trust_env`: see `tls_context`."""
        self._ssl = tls_context(trust_env=trust_env)
        self._room = anyio.Semaphore(max_connections)
        self._idle = deque[tuple[float, httpx.AsyncHTTPTransport]]()
        """Since when it is not used, and the connection; the one used last is at the end."""
        self._clock = clock

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        await self._close_unused()
        await self._room.acquire()
        connection = self._idle.pop()[1] if self._idle else self._connection()
        try:
            answer = await connection.handle_async_request(request)
        except BaseException:
            self._put_back(connection)
            raise
        assert isinstance(answer.stream, httpx.AsyncByteStream)  # noqa: S101 - httpx's own
        answer.stream = _Body(answer.stream, lambda: self._put_back(connection))
        return answer

    async def aclose(self) -> None:
        """Close all connections."""
        while self._idle:
            await self._idle.popleft()[1].aclose()

    def _connection(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_IDLE_S)
        return httpx.AsyncHTTPTransport(verify=self._ssl, limits=limits)

    def _put_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        self._idle.append((self._clock(), connection))
        self._room.release()

    async def _close_unused(self) -> None:
        while self._idle and self._idle[0][0] < self._clock() - _IDLE_S:
            await self._idle.popleft()[1].aclose()


class _Body(httpx.AsyncByteStream):
    """The body of an answer. `closed` is called once it is closed, however that ends."""

    def __init__(self, body: httpx.AsyncByteStream, closed: Callable[[], None]) -> None:
        self._body = body
        self._closed: Callable[[], None] | None = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            if self._closed is not None:
                self._closed()
                self._closed = None
