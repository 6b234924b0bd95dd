"""Client of a text-only server: any server with OpenAI's `/chat/completions`.

For tests of an environment, never for training.

`ChatClient` sends chat messages and returns the text of an answer, with its number of tokens if the server counts them.
`ChatInference` lets an environment play against such a server through the interface of a token server: it spells a
conversation in ids of its own (one id a character), which only this module reads. These are not the model's token ids,
and their logprobs are 0, so nothing may be trained on them.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx
import msgspec
import numpy as np

from lachesis.pipeline.common.proxies import describe_proxy, is_on_this_machine
from lachesis.pipeline.common.secrets import MASK, without_secrets
from lachesis.pipeline.errors import InfrastructureError, PromptTooLongError, ServerAwayError, leaves
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams, WeightVersionSpan
from lachesis.schemas.errors import DataError

__all__ = ["ChatClient", "ChatInference", "ChatReply"]

T = TypeVar("T")

_ROLES = ("system", "user", "assistant", "tool")
_END = 0
_FIRST_CHARACTER = 1 + len(_ROLES)
_MAX_QUOTED_CHARS = 300
_MAX_REPLY_BYTES = 16 << 20
"""An answer of a hundred thousand tokens is far below."""
_BUSY = frozenset({429, 502, 503, 504})
_CONNECT_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 100
"""Requests under way at once; the time of one that waits for its turn does not count."""
_VERSION = "0-text-0000"


class ChatReply(msgspec.Struct, frozen=True):
    """One answer. `tokens`: generated ones, None where the server does not count them."""

    text: str
    finish_reason: str
    tokens: int | None


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _ChatCompletion(msgspec.Struct):
    choices: list[_ChatChoice]
    usage: _Usage | None = None


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class ChatClient:
    """An async context manager over one server. `url` ends where `/chat/completions` follows: `http://HOST:PORT/v1`.

    A whole answer must have arrived within `timeout_s` seconds, also from a server that keeps sending.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 120.0) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._timeout_s = timeout_s
        self._turns = anyio.CapacityLimiter(_MAX_CONNECTIONS)
        self._http = httpx.AsyncClient(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS),
            trust_env=not is_on_this_machine(url),  # a proxy leads elsewhere
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def models(self) -> list[str]:
        """Return the names of the models that the server lists. Raises as `complete`."""
        found = self._decoded(await self._request("GET", "/models"), _ModelList)
        return [model.id for model in found.data]

    async def complete(
        self,
        model: str,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatReply:
        """Return one answer of `model`. `chat_template_kwargs`: as servers of open models take them.

        Raises InfrastructureError when the server is unavailable or too slow, DataError when it refuses the request or
        sends no answer.
        """
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        if chat_template_kwargs:
            body["chat_template_kwargs"] = dict(chat_template_kwargs)
        if sampling.max_tokens is not None:
            body["max_tokens"] = sampling.max_tokens
        found = self._decoded(await self._request("POST", "/chat/completions", body), _ChatCompletion)
        if not found.choices:
            raise DataError(f"{self._where} sent no answer")
        choice = found.choices[0]
        tokens = None if found.usage is None else found.usage.completion_tokens
        reason = "length" if choice.finish_reason == "length" else "stop"
        return ChatReply(choice.message.content or "", reason, tokens)

    @property
    def _where(self) -> str:
        return f"server {without_secrets(self.url)}{describe_proxy(self.url)}"

    async def _request(self, method: str, path: str, body: Any = None) -> bytes:
        data = bytearray()
        try:
            async with self._turns:
                with anyio.fail_after(self._timeout_s):
                    async with self._http.stream(method, self.url + path, json=body) as response:
                        async for part in response.aiter_bytes():
                            data += part
                            if len(data) > _MAX_REPLY_BYTES:
                                raise DataError(
                                    f"{self._where} answered {path} with more than {_MAX_REPLY_BYTES} bytes"
                                )
        except TimeoutError as error:
            raise InfrastructureError(
                f"{self._where}, {path}: no whole answer within {self._timeout_s:g} s, after {len(data)} bytes of it; "
                "raise the environment's timeout_s if its answers take longer"
            ) from error
        except httpx.TransportError as error:
            raise ServerAwayError(f"{self._where}, {path}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_success:
            return bytes(data)
        text = f"{self._where} answered {path} with {response.status_code}: {self._quoted(data)}"
        if response.status_code in _BUSY:
            raise ServerAwayError(text)
        if response.status_code >= 500 or response.status_code == httpx.codes.REQUEST_TIMEOUT:
            raise InfrastructureError(text)
        raise (PromptTooLongError if b"maximum context length" in data else DataError)(text)

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            said = self._quoted(data)
            raise DataError(f"{self._where} speaks no OpenAI chat completions: {error}; it sent {said!r}") from error

    def _quoted(self, data: bytes | bytearray) -> str:
        """Return the beginning of an answer, without the key: servers that refuse one tend to repeat it."""
        text = data.decode(errors="replace")
        return (text.replace(self._key, MASK) if self._key else text)[:_MAX_QUOTED_CHARS]


class ChatInference:
    """An `Inference` over a `ChatClient`; `tokens` counts the generated tokens, None if unknown."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self.tokens: int | None = 0
        self._client = client
        self._model = model
        self._template_kwargs: Mapping[str, Any] | None = None

    async def tokenize(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids that spell a conversation.

        The parameters of the template go with the requests to come. Raises `DataError` for tools, and for a role
        that is not known.
        """
        if tools:
            raise DataError("tools are not passed on to this server; name them in a system message")
        self._template_kwargs = chat_template_kwargs
        ids = []
        for message in messages:
            if message["role"] not in _ROLES:
                raise DataError(f"a message has the role {message['role']!r:.60}; use one of {', '.join(_ROLES)}")
            ids += [1 + _ROLES.index(message["role"]), *_spell(message["content"]), _END]
        return [*ids, 1 + _ROLES.index("assistant")] if add_generation_prompt else ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, without roles."""
        return "".join(chr(i - _FIRST_CHARACTER) for i in token_ids if i >= _FIRST_CHARACTER)

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        """Return `n` answers, a request each, all at once: many servers know no `n`.

        Raises as `ChatClient.complete`.
        """
        messages = await self._messages(prompt_ids)
        answers: dict[int, GeneratedSample] = {}

        async def one(number: int) -> None:
            answers[number] = await self._answer(messages, sampling or SamplingParams())

        try:
            async with anyio.create_task_group() as tasks:
                for number in range(n):
                    tasks.start_soon(one, number)
        except ExceptionGroup as errors:
            raise leaves(errors)[0] from errors
        return [answers[number] for number in range(n)]

    async def _messages(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        starts = [place for place, i in enumerate(ids) if _END < i < _FIRST_CHARACTER]
        messages = []
        for start, end in pairwise(starts):
            role = _ROLES[ids[start] - 1]
            # calls stand in the text, so a server knows of none that a tool's message could answer
            role = "user" if role == "tool" else role
            messages.append({"role": role, "content": await self.detokenize(ids[start:end])})
        return messages

    async def _answer(self, messages: list[dict[str, Any]], sampling: SamplingParams) -> GeneratedSample:
        if sampling.structured_outputs is not None:
            raise DataError("structured_outputs: answers of an API are not constrained here; vLLM can constrain them")
        reply = await self._client.complete(self._model, messages, sampling, self._template_kwargs)
        self.tokens = None if self.tokens is None or reply.tokens is None else self.tokens + reply.tokens
        ids = [*_spell(reply.text), _END]
        return GeneratedSample(
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            text=reply.text,
            finish_reason=reply.finish_reason,
            weight_versions=[WeightVersionSpan(version=_VERSION, start=0, end=len(ids))],
        )


def _spell(text: str) -> list[int]:
    return [ord(character) + _FIRST_CHARACTER for character in text]
