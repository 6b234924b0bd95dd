"""Loads the tokenizer of a run's servers into a client's process, which then renders by itself.

Each request to tokenize costs two processes some milliseconds, and a turn of a conversation would make three of them.
Guarantees that a tokenizer is held only if it is the server's: its hash is the one that the server states, and it
renders and decodes sample conversations as the server does.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio.to_thread

from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.pipeline.extension import load_place
from lachesis.pipeline.inference.client import Capabilities, InferenceClient
from lachesis.pipeline.inference.directory import InferenceDirectory
from lachesis.pipeline.inference.protocol import TokenizeRequest
from lachesis.pipeline.inference.serving.text_tokenizer import TextTokenizer
from lachesis.pipeline.inference.settings import TokenizerSource
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["load_local_tokenizer"]

_LOAD = "lachesis.pipeline.model.pretrained_tokenizer:load_tokenizer"
_HASH = "lachesis.pipeline.model.tokenizer:tokenizer_hash"
"""Loaded by name: they need transformers, which a process of environments may lack."""
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is 17 + 5?\nSay it in words."},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": " Zwölf? "},
]
_CALL: dict[str, Any] = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
_CALLED: list[dict[str, Any]] = [
    _TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "22", "tool_call_id": "abcdefghi"},
]
_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
_SAMPLES: Sequence[TokenizeRequest] = [
    TokenizeRequest(messages=_TALK[:1]),
    TokenizeRequest(messages=_TALK),
    TokenizeRequest(messages=[{"role": "system", "content": "Be brief."}, *_TALK]),
    TokenizeRequest(messages=_TALK[:2], add_generation_prompt=False),
    TokenizeRequest(messages=_TALK[:1], tools=[_TOOL]),
    TokenizeRequest(messages=_CALLED, tools=[_TOOL]),
]


async def load_local_tokenizer(
    directory: InferenceDirectory, capabilities: Capabilities, source: TokenizerSource
) -> str | None:
    """Let the clients of a directory tokenize in this process. Returns why they do not; None: they do.

    `capabilities`: those of its server. `source`: where the tokenizer of the run's configuration lies. Raises
    `InfrastructureError` where the server does not answer.
    """
    client = await directory.current()
    if source.name is None:
        return "no tokenizer is configured"
    if capabilities.tokenizer_hash is None:
        return "the server does not state the hash of its tokenizer"
    try:
        tokenizer, found = await anyio.to_thread.run_sync(partial(_load, source))
    except (ImportError, ConfigError) as error:
        return str(error)
    if found != capabilities.tokenizer_hash:
        return f"{source.name} holds another tokenizer or chat template than the server"
    texts = TextTokenizer(tokenizer, capabilities.max_model_len)
    if not await _agrees(client, texts):
        return f"{client.where} renders sample conversations differently, though its tokenizer has the same hash"
    directory.hold(texts)
    return None


def _load(source: TokenizerSource) -> tuple[Any, str]:
    with uncollected_imports():  # each collection would look through transformers, and hold all calls for 0.2 s
        tokenizer = load_place(_LOAD)(source.name, source.chat_template)
        return tokenizer, load_place(_HASH)(tokenizer)


async def _agrees(client: InferenceClient, texts: TextTokenizer) -> bool:
    """Return whether the server renders and decodes the sample conversations as `texts` does."""
    for sample in _SAMPLES:
        try:
            own = await texts.tokens(sample)
        except DataError:
            continue  # such requests are left to the server
        try:
            served = await client.tokenize(
                sample.messages or [], add_generation_prompt=sample.add_generation_prompt, tools=sample.tools
            )
        except DataError:
            return False
        if own != served or texts.text(own) != await client.detokenize(served):
            return False
    return True
