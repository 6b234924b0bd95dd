"""Runs an HTTP server inside a service.

It leaves signals to the service, drains with it, releases its sockets, and counts its answers.
"""

import asyncio
import socket
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Self
from urllib.parse import urlsplit

import anyio
import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from lachesis.pipeline.common.loopback import is_loopback
from lachesis.pipeline.common.ticks import seconds_to_tick
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.telemetry.performance import CallRecord

__all__ = [
    "BrowserGuard",
    "CancellableServer",
    "HttpServer",
    "RequestCounter",
    "TimedHttpProtocol",
    "host_of",
    "http_within",
    "listen",
]


KEEP_ALIVE_S = 75
"""Well above the 5 s after which common clients (httpx, and so OpenAI's and Anthropic's) drop a connection: one that
the server closes first may be closed under a request that was just sent, which not every client sends again."""
_DATE_S = 1.0


class RequestCounter:
    """An ASGI application that reports each request for one of `paths` to `answered` once it is answered.

    A call's payload is the request's body as it was sent, and `plain` what the application says in
    `request.state.plain_bytes` that it was before it was compressed. 4xx and 5xx count as failed, and so does an
    application that raises. Items are 1, or what it says in `request.state.items`.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[CallRecord], None], paths: Container[str]) -> None:
        self._app = app
        self._answered = answered
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        began_s, payload, status = time.monotonic(), 0, 500
        state = scope.setdefault("state", {})

        async def received() -> Message:
            nonlocal payload
            message = await receive()
            payload += len(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            ended_s = time.monotonic()
            self._answered(
                CallRecord(
                    ended_s,
                    ended_s - began_s,
                    items=state.get("items", 1),
                    failed=status >= 400,
                    payload=payload or None,
                    plain=state.get("plain_bytes"),
                )
            )


class BrowserGuard:
    """An ASGI application that answers no script of a web page, on loopback either.

    A request with an origin is refused. So is one for a host that is neither of `hosts` nor a loopback address: the
    name of a page may be made to lead here (DNS rebinding). `hosts` None: any host, for a server whose names are
    unknown. `refuse` makes the answer, status 403, of the reason. `has_pages`: it has pages of its own, whose scripts
    are answered, as is a browser that only opens an address.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Container[str] | None,
        refuse: Callable[[str], ASGIApp],
        *,
        has_pages: bool = False,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._refuse = refuse
        self._has_pages = has_pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            if "origin" in headers or not self._is_direct(headers):
                app = self._refuse("requests from web pages are not answered")
            elif self._hosts is not None:
                host = host_of(headers.get("host", ""))
                if host not in self._hosts and not is_loopback(host):
                    app = self._refuse(f"this server is not {host[:100]!r}; request it by its address")
        await app(scope, receive, send)

    def _is_direct(self, headers: Headers) -> bool:
        """Whether no page of another server is behind a request, as far as its browser says."""
        site = headers.get("sec-fetch-site", "none")
        if not self._has_pages:
            return site == "none"
        opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site in {"none", "same-origin"} or opens


def host_of(address: str) -> str:
    """Return the host of `HOST:PORT`, `[V6]:PORT` or `HOST`, in lower case; of anything else nothing."""
    try:
        return urlsplit(f"//{address}").hostname or ""
    except ValueError:
        return ""


def listen(host: str, port: int, setting: str) -> socket.socket:
    """Return a socket that listens on `port`, 0 for a free one.

    Raises `StartupError` that names the `setting` when it cannot.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on port {port} of {host} ({error.strerror}); set {setting} to 0 for a free one"
        ) from error
    return listener


class TimedHttpProtocol(H11Protocol):
    """uvicorn's HTTP for clients that may not be honest.

    A request's headers must have arrived within `head_s` seconds, else the client is answered 408 and cut off; so is
    one that goes on sending for as long after it was answered.
    """

    head_s = 10.0
    _too_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio does so for sockets whose protocol is named, and a listener made by hand names none. Without it, the
        # body of an answer waits for some 40 ms until the client has acknowledged the headers.
        if (connected := transport.get_extra_info("socket")) is not None:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the clock when a request is still to come, stop it once its headers are there."""
        answered = self.cycle is not None and self.cycle.response_complete
        if self.conn.their_state is not h11.IDLE and not answered:
            self._forget()
        elif self._too_late is None:
            self._too_late = self.loop.call_later(self.head_s, self._cut_off)

    def _forget(self) -> None:
        if self._too_late is not None:
            self._too_late.cancel()
            self._too_late = None

    def _cut_off(self) -> None:
        if self.transport.is_closing():
            return
        begun = self.cycle is None or self.conn.trailing_data[0]
        if begun and self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            answer = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            text = h11.Data(data=b"the headers of the request did not arrive in time")
            for event in (answer, text, h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def http_within(head_s: float) -> type[TimedHttpProtocol]:
    """Return `TimedHttpProtocol` with that bound, for `http=` of uvicorn's configuration."""
    return type("Http", (TimedHttpProtocol,), {"head_s": head_s})


class CancellableServer(uvicorn.Server):
    """uvicorn in a task that may be cancelled."""

    async def serve_until_cancelled(self, sockets: list[socket.socket]) -> None:
        """Serve; when cancelled, too, the event loop forgets the sockets, whose numbers the next ones may get."""
        try:
            await self.serve(sockets)
        finally:
            for listening in getattr(self, "servers", []):  # none yet if it was cancelled before it began
                listening.close()


class HttpServer(CancellableServer):
    """A server inside a service, to be served by `serve_until_cancelled` with `stop_on_drain` beside it."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopped = anyio.Event()

    @classmethod
    def over(
        cls,
        app: ASGIApp,
        *,
        head_s: float = TimedHttpProtocol.head_s,
        grace_s: int,
        max_connections: int | None = None,
        keep_alive_s: int = KEEP_ALIVE_S,
    ) -> Self:
        """Return the server of an application, which does not name itself.

        `head_s`: seconds in which a request's headers must have arrived. `grace_s`: seconds that requests under way
        have to end once it stops. `max_connections`: from how many on more are refused; None: no bound. `keep_alive_s`:
        seconds after which a connection without a request is closed.
        """
        return cls(
            uvicorn.Config(
                app,
                log_level="warning",
                lifespan="off",
                server_header=False,
                http=http_within(head_s),
                limit_concurrency=max_connections,
                timeout_graceful_shutdown=grace_s,
                timeout_keep_alive=keep_alive_s,
            )
        )

    async def stop_on_drain(self, service: Service) -> None:
        """Stop once the service drains: requests under way have a while to end."""
        await service.draining.wait()
        self.stop()

    def stop(self) -> None:
        """Let requests under way end, and no other begin."""
        self.should_exit = True
        self._stopped.set()

    async def main_loop(self) -> None:
        """Wait for `stop`; once a second, renew the date of answers.

        uvicorn's own loop looks ten times a second whether it should end.
        """
        while not await self.on_tick(0):
            with anyio.move_on_after(seconds_to_tick(_DATE_S)):
                await self._stopped.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service, which drains on them."""
        yield
