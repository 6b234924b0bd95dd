"""How a sample ended is one of what the protocol knows, else the answer makes no sense and is waited out."""

from typing import Any

import httpx
import msgspec
import pytest

from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig

MISSING = object()


def open_client(finish_reason: Any) -> InferenceClient:
    """Return a client of a server whose samples end so."""
    choice = {
        "index": 0, "token_ids": [5], "text": "a", "finish_reason": finish_reason,
        "logprobs": {"content": [{"logprob": -1.0}]},
        "weight_versions": [{"start": 0, "end": 1, "version": "0-abc"}],
    }  # fmt: skip
    if finish_reason is MISSING:
        del choice["finish_reason"]
    answer = msgspec.json.encode({"choices": [choice]})
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    return InferenceClient(ClientConfig(url="http://127.0.0.1:1"), transport=transport)


@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
async def test_known_ends_are_kept(reason: str) -> None:
    async with open_client(reason) as client:
        (sample,) = await client.generate([3, 4], 1)
    assert sample.finish_reason == reason


async def test_an_end_that_is_left_out_is_the_protocols_own() -> None:
    async with open_client(MISSING) as client:
        (sample,) = await client.generate([3, 4], 1)
    assert sample.finish_reason == "stop"


@pytest.mark.parametrize(
    "reason", ["eos\0", "Stop", " stop", "", "tool", "error", "tool_calls", "repetition", "x" * 10_000, None]
)
async def test_other_texts_make_no_sense_and_are_named(reason: str | None) -> None:
    async with open_client(reason) as client:
        with pytest.raises(
            UnreadableAnswerError, match=r"sent the finish_reason .* none of stop, length, abort"
        ) as caught:
            await client.generate([3, 4], 1)
    assert len(str(caught.value)) < 300
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("reason", [0, {"type": "stop"}, ["stop"], True])
async def test_what_is_no_text_makes_no_sense_either(reason: Any) -> None:
    async with open_client(reason) as client:
        with pytest.raises(UnreadableAnswerError, match="finish_reason"):
            await client.generate([3, 4], 1)
