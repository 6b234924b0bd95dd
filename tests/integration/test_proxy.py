"""The proxy that tests cut connections with: what is cut is gone, what is silenced comes late."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from integration.proxy import Proxy, open_proxy


@asynccontextmanager
async def echo() -> AsyncIterator[Proxy]:
    async def answer(stream: SocketStream) -> None:
        async with stream:
            async for chunk in stream:
                await stream.send(chunk)

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, answer)
        async with open_proxy(listener.extra(SocketAttribute.local_port)) as proxy:  # noqa: S610 - no database
            yield proxy
        tasks.cancel_scope.cancel()


async def test_it_relays_until_it_cuts() -> None:
    async with echo() as proxy, await anyio.connect_tcp("127.0.0.1", proxy.port) as client:
        await client.send(b"hello")
        assert await client.receive() == b"hello"
        assert proxy.cut() == 1
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await client.receive()
        async with await anyio.connect_tcp("127.0.0.1", proxy.port) as again:
            await again.send(b"back")
            assert await again.receive() == b"back"


@pytest.mark.parametrize("answers_only", [True, False])
async def test_what_is_silenced_comes_late(answers_only: bool) -> None:
    async with (
        echo() as proxy,
        await anyio.connect_tcp("127.0.0.1", proxy.port) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: proxy.silence(3600, answers_only=answers_only))
        await anyio.wait_all_tasks_blocked()
        await client.send(b"hello")
        with anyio.move_on_after(0.1) as early:
            await client.receive()
        assert early.cancelled_caught
        tasks.cancel_scope.cancel()  # which ends the silence
        with anyio.CancelScope(shield=True), anyio.fail_after(30):
            assert await client.receive() == b"hello"
