"""Passes on requests of sessions that another replica of the environment holds.

So agents may request any of the endpoints, which may have one address. Guarantees that a request is passed on once at
most; that an agent which hangs up is gone for the endpoint that answers it, too; and that a key which no replica knows
gets 401, but 503 while a replica is away: another one takes its sessions up from the log, and then answers. A replica
that was stopped holds up no request of a session that another one has, and those of its own until they are taken up.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

import anyio
import httpx
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.inference.serving.replies import read_body
from lachesis.schemas.errors import ConfigError

__all__ = ["NOT_YET", "Peers", "UnknownSessionError", "check_peers"]

_PASSED_ON = "x-lachesis-passed-on"
"""Header of a request that a replica has passed on; it is not passed on again."""
NOT_YET = "x-lachesis-not-yet"
"""Header of the answer of a replica that may still take the session up from the log."""
_REQUEST_HEADERS = ("accept", "authorization", "content-type", "x-api-key", "x-stainless-retry-count")
_ANSWER_HEADERS = ("cache-control", "content-type", "retry-after")
_CONNECT_S = 5.0
_MAX_IDLE = 64
"""Connections to peers that are kept for the next request."""


class UnknownSessionError(AccessError):
    """Raised by a request whose key is of no session of this process."""


def check_peers(addresses: Sequence[str]) -> None:
    """Raise `ConfigError` for what is no address of an endpoint."""
    for address in addresses:
        try:
            found = httpx.URL(address)
        except (httpx.InvalidURL, TypeError) as error:
            raise ConfigError(f"agent: peers: {address!r:.120} is no URL: {error}") from error
        if found.scheme not in {"http", "https"} or not found.host:
            raise ConfigError(f"agent: peers: {address!r:.120}: use http://HOST:PORT")


class Peers:
    """The endpoints of other replicas. `addresses`: `http://HOST:PORT`; this one's own may be among them."""

    def __init__(self, addresses: Sequence[str], http: httpx.AsyncClient) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._http = http

    @classmethod
    @asynccontextmanager
    async def connected(cls, addresses: Sequence[str]) -> AsyncIterator[Self]:
        """Yield the peers at these addresses.

        They are reached without a proxy, and without a time limit for answers, which take as long as the model does.
        """
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_IDLE)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as http:
            yield cls(addresses, http)

    async def answer(
        self, request: Request, unknown: UnknownSessionError, taken_up: Callable[[], Awaitable[None]]
    ) -> Response | Request:
        """Return the answer of the replica that has the session of a request.

        `taken_up` returns once this process has it; then the request itself is returned, to be answered here.

        Raises `unknown` if none has it, `InfrastructureError` if one is away, which may have it, and `ClientDisconnect`
        if the agent hangs up first.
        """
        if _PASSED_ON in request.headers:
            raise unknown
        body = await read_body(request)
        found, away = list[httpx.Response](), list[str]()
        has_hung_up = False

        is_here = False

        async def watch_here() -> None:
            nonlocal is_here
            await taken_up()
            is_here = True
            tasks.cancel_scope.cancel()

        async def watch() -> None:
            nonlocal has_hung_up
            while (await request.receive())["type"] != "http.disconnect":
                pass
            has_hung_up = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            tasks.start_soon(watch_here)
            await self._ask_all(request, body, found, away)
            tasks.cancel_scope.cancel()
        if has_hung_up:
            for answer in found:
                await answer.aclose()
            raise ClientDisconnect
        if not found and is_here:
            return _unread(request, body)
        for answer in found:
            headers = {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}
            closed = BackgroundTask(answer.aclose)
            return StreamingResponse(answer.aiter_bytes(), answer.status_code, headers, background=closed)
        if away:
            raise InfrastructureError(
                f"no session here has this key, and the endpoint at {away[0]} is away or new; another one "
                "takes up what it held: try again"
            )
        raise unknown

    async def _ask_all(self, request: Request, body: bytes, found: list[httpx.Response], away: list[str]) -> None:
        """Ask all peers at once, as one may be stopped, until one has the session: its answer is `found`.

        Peers that are away, or do not know yet which sessions they have, are added to `away`.
        """

        async def ask(address: str) -> None:
            try:
                answer = await self._http.send(self._passed_on(address, request, body), stream=True)
            except httpx.TransportError:
                away.append(address)
                return
            if NOT_YET in answer.headers:
                away.append(address)
            elif answer.status_code != httpx.codes.UNAUTHORIZED and not found:
                found.append(answer)
                tasks.cancel_scope.cancel()
                return
            await answer.aclose()

        async with anyio.create_task_group() as tasks:
            for address in self._addresses:
                tasks.start_soon(ask, address)

    def _passed_on(self, address: str, request: Request, body: bytes) -> httpx.Request:
        headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
        url = f"{address}{request.url.path}"
        return self._http.build_request(request.method, url, headers={**headers, _PASSED_ON: "1"}, content=body)


def _unread(request: Request, body: bytes) -> Request:
    """Return a request whose body was read, to be read once more."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return parts.pop() if parts else await request.receive()

    return Request(request.scope, receive)
