"""A TCP proxy on loopback between clients and one server, whose connections can be cut and silenced at will."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, SocketAttribute, SocketStream

__all__ = ["Proxy", "open_proxy"]


class Proxy:
    """Relays between clients of `port` and 127.0.0.1:`target`, which may come and go."""

    def __init__(self, port: int, target: int) -> None:
        self.port = port
        self._target = target
        self._heard = {"questions": anyio.Event(), "answers": anyio.Event()}
        self.pass_on()
        self._connections: set[anyio.CancelScope] = set()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    def cut(self) -> int:
        """Close every connection at once, with whatever is under way on it; return how many there were."""
        cut = len(self._connections)
        for scope in self._connections:
            scope.cancel()
        return cut

    async def silence(self, seconds: float, *, answers_only: bool = False) -> None:
        """Pass nothing on for so long, or nothing that the server says, without a sign; then go on where it stopped.

        What is cut meanwhile is lost.
        """
        self.hold_back(answers_only=answers_only)
        try:
            await anyio.sleep(seconds)
        finally:
            self.pass_on()

    def hold_back(self, *, answers_only: bool = False) -> None:
        """Pass nothing on, or nothing that the server says, until `pass_on`, without a sign."""
        for direction in ["answers"] if answers_only else ["questions", "answers"]:
            self._heard[direction] = anyio.Event()

    def pass_on(self) -> None:
        """Go on where it stopped."""
        for heard in self._heard.values():
            heard.set()

    async def relay(self, client: SocketStream) -> None:
        """Serve one connection."""
        async with client:
            try:
                server = await anyio.connect_tcp("127.0.0.1", self._target)
            except OSError:
                return  # the server is unavailable: so is the connection
            async with server, anyio.create_task_group() as tasks:
                self._connections.add(tasks.cancel_scope)
                tasks.start_soon(self._pass_on, "questions", client, server, tasks.cancel_scope)
                tasks.start_soon(self._pass_on, "answers", server, client, tasks.cancel_scope)
            self._connections.discard(tasks.cancel_scope)

    async def _pass_on(
        self, direction: str, source: ByteReceiveStream, sink: ByteSendStream, scope: anyio.CancelScope
    ) -> None:
        try:
            async for chunk in source:
                await self._heard[direction].wait()
                await sink.send(chunk)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # one side is gone, so the other goes as well
        scope.cancel()


@asynccontextmanager
async def open_proxy(target: int) -> AsyncIterator[Proxy]:
    """Run a proxy before the server on port `target` of loopback, on a free port, while the context is open."""
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        proxy = Proxy(listener.extra(SocketAttribute.local_port), target)  # noqa: S610 - no database
        tasks.start_soon(listener.serve, proxy.relay)
        yield proxy
        tasks.cancel_scope.cancel()
