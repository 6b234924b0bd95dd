"""`/generate` on real vLLM: its own routes are called inside its process, by no socket.

Guarantees that token ids and logprobs are those of vLLM's `/v1/completions`, that a refusal has vLLM's own text, and
that the work of a client that hangs up is dropped. Runs inside vLLM's process, on msgspec and the standard library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from lachesis.pipeline.inference.protocol import (
    MAX_BODY_BYTES,
    DetokenizeResponse,
    PromptLogprobs,
    SamplingParams,
    TokenizeRequest,
    TokenizeResponse,
)
from lachesis.pipeline.inference.serving.generate_route import TextSample, answer_generate
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import from_json

__all__ = ["VllmRefusal", "answer_by_vllm"]

Message = dict[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
T = TypeVar("T")


class VllmRefusal(Exception):  # noqa: N818 - an answer more than an error
    """Raised when one of vLLM's routes answers with another status than 200: the client gets that answer."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.body = body


class _Logprobs(Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]


class _Choice(Struct):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _Completion(Struct):
    choices: list[_Choice]


async def answer_by_vllm(app: App, scope: Message, receive: Callable[[], Awaitable[Message]]) -> bytes:
    """Return the answer to a request for `/generate`, as JSON.

    Raises `DataError` for a value that is wrong or not served, `VllmRefusal` when vLLM refuses.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DataError("the client has hung up")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise DataError(f"the body has more than {MAX_BODY_BYTES} bytes.")
        if not message.get("more_body", False):
            break
    given = from_json("the request", dict[str, Any], bytes(body) or b"{}")
    return msgspec.json.encode(await answer_generate(given, _VllmRoutes(app, scope, receive)))


class _VllmRoutes:
    """vLLM's routes for one request, by calls of its application."""

    def __init__(self, app: App, scope: Message, receive: Callable[[], Awaitable[Message]]) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive

    async def tokenize(self, text: str) -> list[int]:
        return (await self._call("POST", "/tokenize", TokenizeResponse, TokenizeRequest(prompt=text))).tokens

    async def detokenize(self, tokens: list[int]) -> str:
        return (await self._call("POST", "/detokenize", DetokenizeResponse, {"tokens": tokens})).prompt

    async def sample(self, prompt: list[int], params: SamplingParams) -> tuple[list[TextSample], PromptLogprobs | None]:
        asked = msgspec.to_builtins(params) | {
            "prompt": prompt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        before = await self._weight_version()
        completion = await self._call("POST", "/v1/completions", _Completion, asked)
        version = before if await self._weight_version() == before else None  # else it changed on the way
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        samples = [_sample(choice, params.logprobs, version) for choice in choices]
        return samples, choices[0].prompt_logprobs if choices else None

    async def _weight_version(self) -> str:
        return (await self._call("GET", "/weight_info", dict[str, str]))["weight_version"]

    async def _call(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        """Return the answer of a route as a `kind`. If the client hangs up, the route sees it and ends the work."""
        sent = b"" if body is None else msgspec.json.encode(body)
        kept = [(name, value) for name, value in self._scope["headers"] if name not in _OF_THE_BODY]
        headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
        root = self._scope.get("root_path", "")
        inner = {
            **self._scope,
            "method": method,
            "path": root + path,
            "raw_path": (root + path).encode(),
            "query_string": b"",
            "headers": headers,
            "state": dict(self._scope.get("state", {})),
        }
        unread = [{"type": "http.request", "body": sent, "more_body": False}]
        answered: list[Message] = []

        async def receive() -> Message:
            return unread.pop() if unread else await self._receive()

        async def keep(message: Message) -> None:
            answered.append(message)

        await self._app(inner, receive, keep)
        status = answered[0]["status"] if answered else 499  # no answer is sent to a client that has hung up
        whole = b"".join(message.get("body", b"") for message in answered[1:])
        if status != 200:
            raise VllmRefusal(status, whole)
        return from_json(f"vLLM's answer to {path}", kind, whole)


_OF_THE_BODY = frozenset({b"content-type", b"content-length", b"content-encoding", b"transfer-encoding", b"expect"})


def _sample(choice: _Choice, top_k: int | None, version: str | None) -> TextSample:
    found = choice.logprobs
    tops = [sorted(_by_id(top or {}), key=lambda pair: -pair[1])[:top_k] for top in found.top_logprobs] if found else []
    return TextSample(
        token_ids=choice.token_ids,
        logprobs=found.token_logprobs if found else [],
        top_logprobs=tops if top_k else [],
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        text=choice.text,
        weight_version=version,
    )


def _by_id(top: dict[str, float]) -> list[tuple[int, float]]:
    return [(int(name.removeprefix("token_id:")), logprob) for name, logprob in top.items()]
