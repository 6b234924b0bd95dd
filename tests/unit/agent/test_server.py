"""The agents' server over HTTP: what one request may hold, and who reaches a tool, without the tools themselves."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import pytest

pytest.importorskip("mcp")

from mcp.server.mcpserver import MCPServer

from lachesis.services.agent import server as server_module

pytestmark = [pytest.mark.hostile, pytest.mark.outside]

TOKEN = "token-of-the-test"
CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-03-26", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}},
}
ACCEPTED = {"accept": "application/json, text/event-stream"}


@asynccontextmanager
async def serving(token: str = TOKEN) -> AsyncIterator[httpx.AsyncClient]:
    """Serve no tools, and yield a client that has `token`."""
    ports: list[int] = []
    started = anyio.Event()

    def note(port: int) -> None:
        ports.append(port)
        started.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server_module.serve_http, MCPServer("lachesis"), "127.0.0.1", 0, TOKEN, note)
        await started.wait()
        headers = {"authorization": f"Bearer {token}", **ACCEPTED}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}", headers=headers, timeout=60) as http:
            yield http
        tasks.cancel_scope.cancel()


async def test_a_body_of_a_tools_call_reaches_the_tools_and_a_large_one_does_not() -> None:
    async with serving() as http:
        padded = {**CALL, "params": {**CALL["params"], "padding": "x" * server_module._MAX_BODY_BYTES}}
        for _ in range(3):
            refused = await http.post("/mcp", json=padded)
            assert refused.status_code == 413, refused.text
            assert "more than" in refused.json()["error"]
        answered = await http.post("/mcp", json=CALL)
        assert answered.status_code == 200
        assert "lachesis" in answered.text


async def test_a_body_that_never_ends_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEAD_S", 0.3)  # for as long a client may go on sending after its answer

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    async with serving() as http:
        try:
            answer = await http.post("/mcp", content=endless())
        except httpx.TransportError:  # it was cut off while it was still sending
            return
        assert answer.status_code == 413


async def test_bodies_that_do_not_arrive_are_answered_408_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_BODY_S", 0.3)
    head = "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    async with serving() as http:
        port = http.base_url.port
        asked = f"{head.format(port=port)}Authorization: Bearer {TOKEN}\r\n\r\n{{"
        slow = [await anyio.connect_tcp("127.0.0.1", port) for _ in range(12)]
        for stream in slow:
            await stream.send(asked.encode())
        with anyio.fail_after(60):
            assert (await http.post("/mcp", json=CALL)).status_code == 200
            for stream in slow:
                assert (await stream.receive()).startswith(b"HTTP/1.1 408 ")
                await stream.aclose()


@pytest.mark.parametrize("token", ["another", f"{TOKEN}x", TOKEN[:-1]])
async def test_a_large_body_without_the_token_is_not_read(token: str) -> None:
    async with serving(token) as http:
        assert (await http.post("/mcp", content=b" " * 3_000_000)).status_code == 401
