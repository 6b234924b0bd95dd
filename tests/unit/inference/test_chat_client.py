"""The client of text-only servers: one that is not honest gets no memory, and no second look at the key."""

from collections.abc import AsyncIterator, Callable

import anyio
import httpx
import pytest

from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.inference import chat_client
from lachesis.pipeline.inference.chat_client import ChatClient, ChatInference
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import DataError

pytestmark = pytest.mark.hostile

KEY = "canary-key"


def client_of(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[httpx.Request], httpx.Response], timeout_s: float = 120.0
) -> ChatClient:
    client = ChatClient("http://there/v1", key=KEY, timeout_s=timeout_s)
    monkeypatch.setattr(client._http, "_transport", httpx.MockTransport(answer))
    monkeypatch.setattr(client._http, "_mounts", {})
    return client


@pytest.mark.parametrize("status", [200, 400, 401])
async def test_no_key_is_said_when_a_server_repeats_it(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    client = client_of(monkeypatch, lambda asked: httpx.Response(status, text=asked.headers["authorization"] * 50))
    with pytest.raises(DataError) as refused:
        await client.models()
    assert "Bearer ***" in str(refused.value)
    assert "canary" not in str(refused.value)


async def test_an_endless_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 1000

    monkeypatch.setattr(chat_client, "_MAX_REPLY_BYTES", 10_000)
    client = client_of(monkeypatch, lambda _: httpx.Response(200, content=endless()))
    with pytest.raises(DataError, match="more than 10000 bytes"):
        await client.models()
    assert sent == 11


async def test_an_answer_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def trickling() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await anyio.sleep(0.01)

    client = client_of(monkeypatch, lambda _: httpx.Response(200, content=trickling()), timeout_s=0.2)
    with anyio.fail_after(30), pytest.raises(InfrastructureError, match=r"no whole answer within 0.2 s.*timeout_s"):
        await client.complete("m", [{"role": "user", "content": "a"}], SamplingParams())


async def test_a_redirect_does_not_lead_the_key_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(307, headers={"location": "http://there/elsewhere"})

    with pytest.raises(DataError, match="with 307"):
        await client_of(monkeypatch, answer).models()
    assert asked == ["http://there/v1/models"]


async def test_a_role_that_is_not_known_is_refused_by_name() -> None:
    inference = ChatInference(ChatClient("http://there/v1"), "m")
    with pytest.raises(DataError, match="the role 'developer'; use one of system, user"):
        await inference.tokenize([{"role": "developer", "content": "a"}])
