"""What an application answers is counted, whatever becomes of the request; an answer waits for no acknowledgement."""

import socket

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.pipeline.runtime import http as http_module
from lachesis.pipeline.runtime.http import HttpServer, RequestCounter, listen
from lachesis.pipeline.telemetry.performance import CallRecord


async def take(request: Request) -> Response:
    body = await request.body()
    request.state.items, request.state.plain_bytes = 8, 3 * len(body)
    return Response(status_code=int(body))


async def fail(_: Request) -> Response:
    raise ZeroDivisionError


async def test_calls_are_told_with_their_size_items_and_failures() -> None:
    calls: list[CallRecord] = []
    routes = [Route("/take", take, methods=["POST"]), Route("/fail", fail), Route("/other", fail)]
    app = RequestCounter(Starlette(routes=routes), calls.append, {"/take", "/fail", "/nowhere"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://s") as http:
        for status in ("200", "422", "503"):
            await http.post("/take", content=status)
        for path in ("/fail", "/other"):
            with pytest.raises(ZeroDivisionError):
                await http.get(path)
        await http.get("/nowhere")
    assert [(call.items, call.failed, call.payload, call.plain) for call in calls] == [
        (8, False, 3, 9), (8, True, 3, 9), (8, True, 3, 9), (1, True, None, None), (1, True, None, None),
    ]  # fmt: skip
    assert all(call.seconds > 0 for call in calls)


@pytest.mark.outside
async def test_no_answer_waits_until_the_client_has_acknowledged_its_headers() -> None:
    """As it would, for some 40 ms, on a connection that gathers small packets (Nagle's algorithm)."""
    for listener in (listen("127.0.0.1", 0, "a.port"), socket.create_server(("127.0.0.1", 0))):
        server = HttpServer.over(Starlette(), head_s=10.0, grace_s=1)
        with listener:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve_until_cancelled, [listener])
                port = listener.getsockname()[1]
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
                    await http.get("/")
                    (connection,) = server.server_state.connections
                    accepted = connection.transport.get_extra_info("socket")
                    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                tasks.cancel_scope.cancel()


def test_a_connection_outlives_its_clients_patience() -> None:
    """Else the server may close it under a request that the client has just sent."""
    patience_s = httpx.AsyncClient()._transport._pool._keepalive_expiry  # type: ignore[attr-defined]
    server = HttpServer.over(Starlette(), head_s=1.0, grace_s=1)
    assert server.config.timeout_keep_alive > 2 * patience_s


@pytest.mark.outside
async def test_a_server_that_is_stopped_ends_at_once(monkeypatch) -> None:
    """It waits for that, and does not look again and again whether it should end."""
    monkeypatch.setattr(http_module, "_DATE_S", 1e6)
    with listen("127.0.0.1", 0, "a.port") as listener, anyio.fail_after(60):
        server = HttpServer.over(Starlette(), grace_s=1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve_until_cancelled, [listener])
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}") as http:
                assert (await http.get("/")).headers["date"]
            server.stop()
