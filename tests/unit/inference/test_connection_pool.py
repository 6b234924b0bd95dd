"""Connections of the inference client: how many there are, which is used, and when one is closed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import httpx
import pytest

from lachesis.pipeline.inference.connection_pool import ConnectionPool


@dataclass
class SlowServer:
    """Answers on real sockets once it may; notes its connections. `cut`: it closes each after its `answer`."""

    url: str = ""
    opened: int = 0
    requests: int = 0
    closed: int = 0
    cut: bool = False
    answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
    may_answer: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, stream: anyio.abc.SocketStream) -> None:
        self.opened += 1
        async with stream:
            try:
                while True:
                    assert (await stream.receive()).startswith(b"GET / ")
                    self.requests += 1
                    await self.may_answer.wait()
                    await stream.send(self.answer)
                    if self.cut:
                        break
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass
        self.closed += 1


@asynccontextmanager
async def serving() -> AsyncIterator[SlowServer]:
    server = SlowServer()
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610 - no query
        server.url = f"http://127.0.0.1:{port}/"
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()


async def until(is_so: object) -> None:
    while not is_so():  # type: ignore[operator]  # noqa: ASYNC110 - what happens at a server's sockets sets no event
        await anyio.sleep(0.005)


async def test_requests_one_after_the_other_take_one_connection() -> None:
    async with serving() as server, httpx.AsyncClient(transport=ConnectionPool(8), trust_env=False) as http:
        server.may_answer.set()
        for _ in range(5):
            assert (await http.get(server.url)).text == "hi"
        assert server.opened == 1


async def test_no_more_connections_than_allowed_and_a_cancelled_request_gives_its_own_back() -> None:
    async with serving() as server, httpx.AsyncClient(transport=ConnectionPool(2), trust_env=False) as http:
        async with anyio.create_task_group() as cancelled:
            for _ in range(6):
                cancelled.start_soon(http.get, server.url)
            await until(lambda: server.requests == 2)
            cancelled.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(http.get, server.url)
            await until(lambda: server.requests == 4)
            server.may_answer.set()
        assert (server.requests, server.opened) == (8, 4)


async def test_a_connection_is_taken_by_another_request_only_when_the_body_is_closed() -> None:
    async with serving() as server, httpx.AsyncClient(transport=ConnectionPool(1), trust_env=False) as http:
        server.may_answer.set()
        async with anyio.create_task_group() as tasks, http.stream("GET", server.url) as first:
            tasks.start_soon(http.get, server.url)
            await anyio.wait_all_tasks_blocked()
            assert server.requests == 1
            assert await first.aread() == b"hi"
        assert (server.requests, server.opened) == (2, 1)


async def test_a_connection_that_is_not_used_is_closed() -> None:
    now_s = 0.0
    connections = ConnectionPool(8, clock=lambda: now_s)
    async with serving() as server, httpx.AsyncClient(transport=connections, trust_env=False) as http:
        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(http.get, server.url)
            await until(lambda: server.requests == 4)
            server.may_answer.set()
        now_s = 50.0
        await http.get(server.url)
        assert server.closed == 0
        now_s = 100.0
        await http.get(server.url)
        await until(lambda: server.closed == 3)
        assert server.opened == 4


async def test_a_connection_that_the_server_has_closed_is_made_again() -> None:
    async with serving() as server, httpx.AsyncClient(transport=ConnectionPool(8), trust_env=False) as http:
        server.may_answer.set()
        server.cut = True
        for number in range(1, 4):
            assert (await http.get(server.url)).text == "hi"
            await until(lambda: server.closed == number)  # noqa: B023 - it is awaited here
        assert server.opened == 3


async def test_a_server_that_is_away_takes_no_room() -> None:
    async with httpx.AsyncClient(transport=ConnectionPool(1), trust_env=False) as http:
        for _ in range(3):
            with pytest.raises(httpx.ConnectError):
                await http.get("http://127.0.0.1:9/")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhi", b"no HTTP\r\n\r\n"])
async def test_a_broken_answer_is_an_error_of_httpx_and_its_connection_is_not_used_again(answer: bytes) -> None:
    async with serving() as server, httpx.AsyncClient(transport=ConnectionPool(1), trust_env=False) as http:
        server.may_answer.set()
        whole, server.answer, server.cut = server.answer, answer, True
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get(server.url)
        server.answer, server.cut = whole, False
        assert (await http.get(server.url)).text == "hi"
        assert server.opened == 2
