"""An HTTP server inside a service: it leaves signals to the service, drains with it, and lets go of its sockets."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from lachesis.pipeline.stage.service import Service

__all__ = ["HttpServer"]


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
