"""A status of 4xx is the request's fault, unless the server refuses what it has answered before, too."""

from collections.abc import Callable

import httpx
import pytest

from lachesis.pipeline.errors import PromptTooLongError, UnreadableAnswerError
from lachesis.pipeline.inference.answered_requests import AnsweredRequests
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.schemas.errors import DataError


def open_client(refuses: Callable[[httpx.Request], tuple[int, str] | None]) -> InferenceClient:
    """Return a client of a server that answers what `refuses` returns, or else properly."""

    def answer(request: httpx.Request) -> httpx.Response:
        if (refusal := refuses(request)) is not None:
            return httpx.Response(refusal[0], text=refusal[1])
        choice = {
            "index": 0, "token_ids": [5], "text": "a", "finish_reason": "stop",
            "logprobs": {"content": [{"logprob": -1.0}]},
            "weight_versions": [{"start": 0, "end": 1, "version": "0-abc"}],
        }  # fmt: skip
        answers: dict[str, object] = {
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/tokenize": {"tokens": [1, 2], "count": 2, "max_model_len": 64},
            "/inference/v1/generate": {"choices": [choice]},
        }
        return httpx.Response(200, json=answers[request.url.path])

    return InferenceClient(ClientConfig(url="http://127.0.0.1:1"), transport=httpx.MockTransport(answer))


HI = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("status", [400, 405, 409, 410, 413, 415, 418, 422, 451])
async def test_a_server_that_refuses_what_it_answered_before_is_waited_for(status: int) -> None:
    refused = False
    async with open_client(lambda _: (status, "not today") if refused else None) as client:
        assert await client.tokenize(HI) == [1, 2]
        assert len(await client.generate([3, 4], 1)) == 1
        refused = True
        with pytest.raises(UnreadableAnswerError, match=f"{status}: not today It refuses what it answered before"):
            await client.tokenize([*HI, *HI])
        with pytest.raises(UnreadableAnswerError, match=str(status)):
            await client.generate([7, 8, 9], 1)
        with pytest.raises(UnreadableAnswerError, match=f"/v1/models with {status}"):
            await client.observe(None)
        refused = False
        assert await client.tokenize(HI) == [1, 2]


async def test_a_request_that_alone_is_refused_is_at_fault() -> None:
    def refuses(request: httpx.Request) -> tuple[int, str] | None:
        if b"bad role" in request.content:
            return 422, "no such role"
        return (400, "maximum context length is 64") if b"long" in request.content else None

    async with open_client(refuses) as client:
        with pytest.raises(DataError, match="no such role"):
            await client.tokenize([{"role": "bad role", "content": "hello"}])  # nothing was answered before
        await client.tokenize(HI)
        with pytest.raises(DataError, match="no such role"):
            await client.tokenize([{"role": "bad role", "content": "hello"}])
        with pytest.raises(PromptTooLongError):
            await client.tokenize([{"role": "user", "content": "long"}])


def test_only_a_small_request_is_remembered() -> None:
    answered = AnsweredRequests()
    answered.add("/a", b"x" * (1 << 20))
    assert answered.get("/a") is None
    for body in (b"xxx", b"x", b"xx"):
        answered.add("/a", body)
    assert answered.get("/a") == b"x"
    assert answered.get("/b") is None
