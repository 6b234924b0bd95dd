"""Clients of the text routes that sample otherwise than the trainer computes are named, until they no longer do."""

import httpx
import pytest

from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving.app import TEXT_PATHS
from lachesis.pipeline.inference.serving.sampling_notice import FORGET_AFTER_REQUESTS, SamplingNotice


@pytest.fixture
def said():
    return []


@pytest.fixture
def ask(policy, start_engine, tmp_path, said):
    """Return a function that asks a route of a server whose trainer divides by 1."""
    with start_engine() as engine:
        app = build_app(policy, engine, model_name="tiny", weights_folder=tmp_path)
        noticed = SamplingNotice(app, TEXT_PATHS, 1.0, said.append)

        async def asked(path, **body):
            async with httpx.AsyncClient(transport=httpx.ASGITransport(noticed), base_url="http://test") as client:
                assert (await client.post(path, json=body)).status_code == 200

        yield asked


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", CHAT | {"temperature": 0.7}, "/v1/chat/completions were sampled at temperature 0.7"),
        ("/v1/chat/completions", CHAT | {"top_p": 0.9, "stream": True}, "were sampled with top_p 0.9"),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 1, "top_p": 0.9}, "were sampled with top_p 0.9"),
        ("/generate", {"text": "hi", "sampling_params": {"temperature": 0.5, "max_new_tokens": 1}}, "temperature 0.5"),
        ("/v1/chat/completions", CHAT, None),
        ("/v1/chat/completions", CHAT | {"temperature": 0, "top_p": 0.9}, None),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"top_p": 0.9, "max_tokens": 1}}, None),
    ],
)
async def test_what_a_client_asks_for_otherwise_is_named(ask, said, path, body, told):
    await ask(path, **body)
    assert len(said) == (told is not None)
    assert told is None or (said[0].startswith("1 requests for") and told in said[0])


async def test_it_is_forgotten_once_clients_ask_as_the_trainer_computes(said):
    notice = SamplingNotice(None, TEXT_PATHS, 1.0, said.append)
    notice._compare(SamplingParams(top_p=0.5), "/v1/completions")
    for _ in range(FORGET_AFTER_REQUESTS - 1):
        notice._compare(SamplingParams(), "/v1/completions")
    assert len(said) == 1
    notice._compare(SamplingParams(), "/v1/completions")
    assert said[1:] == [None]
