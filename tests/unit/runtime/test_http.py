"""What an application answers is counted, whatever becomes of the request."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lachesis.pipeline.runtime.http import RequestCounter
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
