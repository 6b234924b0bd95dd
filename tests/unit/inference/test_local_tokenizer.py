"""A client holds the tokenizer of its server only if it is the server's, and then requests no tokens of it."""

from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from lachesis.pipeline.inference.client import Capabilities, InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.local_tokenizer import load_local_tokenizer
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.inference.serving.app import ServedTokens, serving_app
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.pipeline.model.tokenizer import CHAT_TEMPLATE, build_character_tokenizer, save_tokenizer, tokenizer_hash
from lachesis.schemas.errors import DataError

TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "Bye"}]


class IdleEngine:
    """Samples nothing."""

    max_model_len = 64
    weight_version = "0-a-b"
    is_paused = False

    def submit(self, prompt: list[int], params: SamplingParams, listener: Any = None) -> Any:
        raise NotImplementedError


class Directory:
    """Hands out one client."""

    def __init__(self, client: InferenceClient) -> None:
        self.client = client

    async def current(self) -> InferenceClient:
        return self.client

    def hold(self, texts: TextTokenizer) -> None:
        self.client.texts = texts


@pytest.fixture
async def served(tmp_path):
    """A tokenizer's folder, and a function that makes a client of a server with a tokenizer, and its requests."""
    save_tokenizer(build_character_tokenizer(max_length=64), tmp_path)
    async with AsyncExitStack() as stack:

        async def client_of(tokenizer: Any) -> tuple[InferenceClient, Capabilities, list[str]]:
            tokens = ServedTokens(tokenizer, tokenizer_hash(tokenizer), len(tokenizer))
            app = serving_app(tokens, IdleEngine(), model_name="m", read_weights=lambda path, version: None)  # type: ignore[arg-type]
            paths: list[str] = []

            async def noted(scope: Any, receive: Any, send: Any) -> None:
                paths.append(scope["path"])
                await app(scope, receive, send)

            config = ClientConfig(url="http://127.0.0.1:1")
            client = InferenceClient(config, transport=httpx.ASGITransport(noted))
            found = Capabilities(
                model="m", max_model_len=64, weight_version="0-a-b", tokenizer_hash=tokens.tokenizer_hash
            )
            return await stack.enter_async_context(client), found, paths

        yield tmp_path, client_of


async def test_the_tokenizer_of_the_server_is_held_and_the_server_is_not_requested(served):
    folder, client_of = served
    client, found, paths = await client_of(build_character_tokenizer(max_length=64))
    before = await client.tokenize(TALK), await client.detokenize([3, 7, 8])
    assert await load_local_tokenizer(Directory(client), found, TokenizerSource(str(folder))) is None
    paths.clear()
    assert (await client.tokenize(TALK), await client.detokenize([3, 7, 8])) == before
    assert paths == []
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(DataError, match=r"does not read `tools`"):
        await client.tokenize(TALK, tools=[tool])
    assert set(paths) == {"/tokenize"}, "what does not fit the template is left to the server"


async def test_another_tokenizer_than_the_servers_is_not_held(served):
    folder, client_of = served
    client, found, _ = await client_of(build_character_tokenizer(max_length=64, phrases=["Hi"]))
    reason = await load_local_tokenizer(Directory(client), found, TokenizerSource(str(folder)))
    assert "another tokenizer or chat template than the server" in reason
    assert client.texts is None


async def test_a_server_that_renders_otherwise_by_the_same_tokenizer_is_asked(served):
    folder, client_of = served
    tokenizer = build_character_tokenizer(max_length=64)
    client, found, _ = await client_of(tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE + "{{ bos_token if messages | length > 2 else '' }}"
    reason = await load_local_tokenizer(Directory(client), found, TokenizerSource(str(folder)))
    assert "renders sample conversations differently" in reason
    assert client.texts is None


@pytest.mark.parametrize(
    ("source", "stated", "expected"),
    [
        (TokenizerSource(None), "x", "no tokenizer is configured"),
        (TokenizerSource("./nowhere"), "x", "nowhere"),
        (TokenizerSource("./nowhere"), None, "does not state"),
    ],
)
async def test_what_cannot_be_compared_is_not_held(served, source, stated, expected):
    _, client_of = served
    client, found, _ = await client_of(build_character_tokenizer(max_length=64))
    found = Capabilities(
        model=found.model, max_model_len=64, weight_version=found.weight_version, tokenizer_hash=stated
    )
    assert expected in await load_local_tokenizer(Directory(client), found, source)
    assert client.texts is None
