"""Opens models of OpenAI-compatible servers as the command line names them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import httpx

from lachesis.pipeline.common.secrets import key_in_variable, without_secrets
from lachesis.pipeline.evaluator.model_comparison import ModelUnderTest
from lachesis.pipeline.inference.chat_client import ChatClient, ChatInference
from lachesis.schemas.errors import ConfigError

__all__ = ["OPENROUTER_MODELS", "ServerTargets", "open_server_models"]

_OPENROUTER = "openrouter"
_OPENROUTER_URL = "https://openrouter.ai/api/v1"
_OPENROUTER_KEY = "OPENROUTER_API_KEY"
OPENROUTER_MODELS = ("qwen/qwen3-8b", "z-ai/glm-4.7-flash", "minimax/minimax-m2.1")
"""Models of OpenRouter that are used if none is named."""


class ServerTargets(NamedTuple):
    """Servers and models as `--server`, `--model` and `--key-env` name them."""

    servers: Sequence[str]
    models: Sequence[str]
    key_env: str | None


@asynccontextmanager
async def open_server_models(
    asked: ServerTargets, timeout_s: float, *, beside_others: bool
) -> AsyncIterator[list[ModelUnderTest]]:
    """Yield the models, none without a server. `beside_others`: their names say which server they are of.

    Raises ConfigError when a key is missing or it is not clear which model is meant, and as `ChatClient.models`.
    """
    async with AsyncExitStack() as stack:
        models: list[ModelUnderTest] = []
        for url, names in _pairs(asked.servers, asked.models):
            is_router = url == _OPENROUTER
            key = _key(_OPENROUTER_KEY if is_router and not asked.key_env else asked.key_env)
            where = _OPENROUTER_URL if is_router else _checked_url(url)
            chat = await stack.enter_async_context(ChatClient(where, key=key, timeout_s=timeout_s))
            several = beside_others or len(asked.servers) > 1
            models += [_text_model(chat, name, several=several) for name in await _names(chat, is_router, names)]
        yield models


def _text_model(chat: ChatClient, name: str, *, several: bool) -> ModelUnderTest:
    """Return a model of a server; the server is part of its name if `several` places are queried."""
    shown = f"{name} @ {httpx.URL(chat.url).netloc.decode()}" if several else name
    return ModelUnderTest(shown, lambda: ChatInference(chat, name))


def _pairs(servers: Sequence[str], models: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each server with the models to ask it for; none: those it has."""
    if models and not servers:
        raise ConfigError("--model names a model of a server: add --server URL, or give a local model's folder")
    if len(servers) == 1 or not models:
        return [(server, list(models)) for server in servers]
    if len(servers) != len(models):
        raise ConfigError(f"{len(servers)} servers and {len(models)} models: give one --model for each --server")
    return [(server, [model]) for server, model in zip(servers, models, strict=True)]


async def _names(chat: ChatClient, is_router: bool, given: Sequence[str]) -> Sequence[str]:
    if given:
        return given
    if is_router:
        return OPENROUTER_MODELS
    found = await chat.models()
    if not found:
        raise ConfigError(f"server {without_secrets(chat.url)} lists no model: name one with --model")
    return found[:1]


def _key(variable: str | None) -> str | None:
    try:
        return None if variable is None else key_in_variable(variable)
    except ConfigError as error:
        raise ConfigError(f"the server needs a key: {error}") from error


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--server {without_secrets(url)!r}: give http://HOST:PORT/v1, or `{_OPENROUTER}`")
    return url
