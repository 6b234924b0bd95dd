"""An HTTP server inside a service: it leaves signals to the service, drains with it, lets go of its sockets, and counts
what it answers.
"""

import socket
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lachesis.pipeline.stage.service import Service
from lachesis.pipeline.telemetry.performance import Call

__all__ = ["Counted", "HttpServer"]


class Counted:
    """An ASGI application whose requests for one of `paths` are told to `answered`, each once it is answered.

    A call's payload is the request's body as it was sent, and `plain` what the application says in
    `request.state.plain_bytes` that it was before it was compressed. 4xx and 5xx count as failed, and so does an
    application that raises. Items are 1, or what it says in `request.state.items`.
    """

    def __init__(self, app: ASGIApp, answered: Callable[[Call], None], paths: Container[str]) -> None:
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
                Call(
                    ended_s,
                    ended_s - began_s,
                    items=state.get("items", 1),
                    failed=status >= 400,
                    payload=payload or None,
                    plain=state.get("plain_bytes"),
                )
            )


class HttpServer(uvicorn.Server):
    """uvicorn, to be served by `serve_until_cancelled` with `stop_on_drain` beside it."""

    async def serve_until_cancelled(self, sockets: list[socket.socket]) -> None:
        """Serve; when cancelled, too, the event loop forgets the sockets, whose numbers the next ones may get."""
        try:
            await self.serve(sockets)
        finally:
            for listening in getattr(self, "servers", []):  # none yet if it was cancelled before it began
                listening.close()

    async def stop_on_drain(self, service: Service) -> None:
        """Stop once the service drains: requests under way have a while to end."""
        await service.draining.wait()
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave SIGTERM and SIGINT to the service, which drains on them."""
        yield
