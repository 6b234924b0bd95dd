"""Clients that send their requests slowly or not at all: they are cut off in time, and hold up no other client."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from lachesis.pipeline.extensions.atropos.gateway import app as app_module
from lachesis.pipeline.extensions.atropos.gateway import body as body_module

pytestmark = [pytest.mark.hostile, pytest.mark.outside]

HEAD = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"


@asynccontextmanager
async def connected(http: httpx.AsyncClient, sent: str) -> AsyncIterator[Any]:
    """A connection on which so much of a request was sent, and no more."""
    async with await anyio.connect_tcp(http.base_url.host, http.base_url.port) as stream:
        if sent:
            await stream.send(sent.encode())
        yield stream


async def all_of(stream: Any) -> str:
    """Return what comes until the other side closes."""
    with anyio.fail_after(60):
        return b"".join([part async for part in stream]).decode()


def begun(path: str = "/scored_data", body: str = "{", size: int = 1000) -> str:
    return HEAD.format(path=path, size=size) + body


async def test_twelve_slow_bodies_hold_up_nobody(world, make_scored) -> None:
    async with world.gateway(world.config(body_s=3600.0)) as http, AsyncExitStack() as stack:
        number = await world.registered(http)
        for _ in range(12):
            await stack.enter_async_context(connected(http, begun()))
        with anyio.fail_after(40):
            answer = await http.post("/scored_data", json=make_scored(env_id=number))
        assert answer.json() == {"status": "received"}


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register-env", "/disconnect-env"])
async def test_a_body_that_does_not_arrive_is_answered_408(world, path: str) -> None:
    async with world.gateway(world.config(body_s=0.2)) as http, connected(http, begun(path)) as slow:
        said = await all_of(slow)
    assert said.startswith("HTTP/1.1 408 ")
    assert "gateway.body_s" in said
    assert "connection: close" in said.lower()


async def test_a_body_that_trickles_is_cut_off_all_the_same(world) -> None:
    async with world.gateway(world.config(body_s=0.3)) as http, connected(http, begun(size=100_000)) as slow:

        async def trickle() -> None:
            while True:
                await slow.send(b" ")
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trickle)
            with anyio.fail_after(60):
                said = await slow.receive()
            tasks.cancel_scope.cancel()
    assert said.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", ["", "POST /scored", HEAD.format(path="/scored_data", size=9)[:-2]])
async def test_headers_that_do_not_arrive_are_answered_408(world, sent: str) -> None:
    async with world.gateway(world.config(head_s=0.2)) as http, connected(http, sent) as slow:
        said = await all_of(slow)
    assert said.startswith("HTTP/1.1 408 ")
    assert said.endswith("did not arrive in time")


async def test_a_second_request_on_a_connection_has_no_more_time(world) -> None:
    get = "GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with world.gateway(world.config(head_s=0.2)) as http, connected(http, get) as slow:
        await world.registered(http)
        with anyio.fail_after(60):
            assert (await slow.receive()).startswith(b"HTTP/1.1 200 ")
        await slow.send(get[:-4].encode())
        said = await all_of(slow)
    assert "HTTP/1.1 408 " in said


async def test_who_goes_on_sending_after_the_answer_is_cut_off(world) -> None:
    async with world.gateway(world.config(head_s=0.2)) as http, connected(http, begun("/nowhere", "x", 10**9)) as slow:

        async def go_on() -> None:
            while True:
                await slow.send(b"x")
                await anyio.sleep(0.02)

        with anyio.fail_after(60):
            assert (await slow.receive()).startswith(b"HTTP/1.1 404 ")
            with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
                await go_on()


async def test_a_client_that_waits_for_a_lease_is_not_a_slow_one(world, make_scored) -> None:
    async with world.gateway(world.config(head_s=0.1, body_s=0.1)) as http:
        number = await world.registered(http)
        world.governor.open = False
        async with anyio.create_task_group() as tasks:

            async def post() -> None:
                answer = await http.post("/scored_data", json=make_scored(env_id=number))
                assert answer.json() == {"status": "received"}

            tasks.start_soon(post)
            refused = world.governor.refusals
            await world.until(lambda: world.governor.refusals > refused + 30)
            world.governor.open = True


async def test_bodies_on_their_way_are_bounded_in_bytes_and_the_oldest_makes_place(
    world, make_scored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "_UNHURRIED_S", 0.0)
    rooms: list[body_module.BodyBudget] = []

    class Noted(body_module.BodyBudget):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            rooms.append(self)

    monkeypatch.setattr(app_module, "BodyBudget", Noted)
    config = world.config(body_s=3600.0, receiving_bytes=40_000)
    async with world.gateway(config) as http:
        number = await world.registered(http)
        part = " " * 15_000
        async with connected(http, begun(body=part, size=10**6)) as first:
            await world.until(lambda: rooms[0].used_bytes >= len(part))
            async with connected(http, begun(body=part, size=10**6)):
                await world.until(lambda: rooms[0].used_bytes >= 2 * len(part))
                padded = json.dumps(make_scored(env_id=number)) + part
                with anyio.fail_after(40):
                    answer = await http.post("/scored_data", content=padded)
                    assert answer.json() == {"status": "received"}, answer.text
                    assert (await first.receive()).startswith(b"HTTP/1.1 408 ")


class Sent:
    """A request with a body of so many bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def stream(self) -> AsyncIterator[bytes]:
        yield b" " * self.size


async def test_who_finds_no_room_in_time_is_asked_to_come_back() -> None:
    room = body_module.BodyBudget(1000, within_s=0.1)
    async with room.receive(Sent(900), 1000) as held:  # it is there, and waits to be converted
        assert len(held) == 900
        with pytest.raises(body_module.NoRoomError, match="receiving_bytes"):
            async with room.receive(Sent(200), 1000):
                pytest.fail("there was no room")
    async with room.receive(Sent(5000), 9000) as held:  # alone, one may be larger than the room
        assert len(held) == 5000
    assert room.used_bytes == 0
