"""Requests of other servers' clients: OpenAI's routes, and `/generate` of vLLM and of SGLang.

A field that would change the answer and is not supported is refused by name; a field that changes nothing (for example
`user`) is accepted. No torch here.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from lachesis.pipeline.inference.protocol import SamplingParams, TokenId
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import check_plain, convert_plain

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "PromptTokens",
    "SglangRequest",
    "StreamOptions",
    "VllmRequest",
    "template_messages",
]

_COMPLETION_TOKENS = 16
"""`max_tokens` of a completion that does not say, as OpenAI's and vLLM's servers have it."""
_SGLANG_TOKENS = 128
"""`max_new_tokens` where SGLang's client does not say."""
_MAX_PROMPTS = 64

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "json_schema": (),
    "min_new_tokens": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "top_k": (-1, 0),
}
"""What is not served, and the values beside null with which it asks for nothing."""


class StreamOptions(Struct, frozen=True, kw_only=True):
    """`include_usage`: one more event at the end counts the tokens."""

    include_usage: bool = False


class _Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to sample, in names that all of them share."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    frequency_penalty: Any = None
    min_p: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    spaces_between_special_tokens: Any = None
    top_k: Any = None

    def _params(self, max_tokens: int | None, seed: int | None, **logprobs: int | None) -> SamplingParams:
        """Return the request for the engine. Raises `DataError` for a value that is out of range or not served."""
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise DataError(f"{name} is {value!r:.80}; this server cannot do that. Leave it out.")
        given = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            **logprobs,
        }
        named = {key: value for key, value in given.items() if value is not None}
        return convert_plain("the request", SamplingParams, named)


class _OpenAiRequest(_Sampling, frozen=True, kw_only=True):
    """A request of OpenAI's routes."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    """Return the prompt's and the samples' token ids as well."""
    return_tokens_as_token_ids: bool = False
    """Name tokens `token_id:N` in logprobs instead of by their text, which may be half a character."""

    best_of: Any = None
    logit_bias: Any = None
    min_tokens: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    response_format: Any = None

    cache_salt: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    priority: Any = None
    prompt_cache_key: Any = None
    request_id: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class ChatRequest(_OpenAiRequest, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Parameters of the chat template, as enable_thinking."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    """auto or none; a model cannot be made to call a tool here."""
    add_generation_prompt: bool = True

    @property
    def params(self) -> SamplingParams:
        """As `_params`; all that the context holds may be generated by default."""
        if self.tool_choice not in (None, "auto", "none"):
            raise DataError(f"tool_choice is {self.tool_choice!r:.80}; this server knows auto and none.")
        top = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            self.seed,
            logprobs=top,
        )

    @property
    def usable_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call."""
        return None if self.tool_choice == "none" else self.tools or None


class CompletionRequest(_OpenAiRequest, frozen=True, kw_only=True):
    """POST /v1/completions. A prompt is text or token ids; there may be several."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    """Whether the prompt stands before each answer; with `logprobs` its tokens have theirs, too."""
    suffix: Any = None

    @property
    def params(self) -> SamplingParams:
        """As `_params`, for each prompt."""
        limit = 1 if self.only_echoes else _limit(self.max_tokens, _COMPLETION_TOKENS)
        prompt = self.logprobs if self.echo else None
        return self._params(limit, self.seed, logprobs=self.logprobs, prompt_logprobs=prompt)

    @property
    def only_echoes(self) -> bool:
        """Whether nothing is to be sampled, as where a text is only scored. One token is, and left out."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. Raises `DataError` where there are none, or too many."""
        given = self.prompt
        prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not isinstance(prompts, list) or not 1 <= len(prompts) <= _MAX_PROMPTS:
            raise DataError(f"prompt: give text, token ids, or a list of 1 to {_MAX_PROMPTS} of these.")
        return [one if isinstance(one, str) else convert_plain("prompt", list[TokenId], one) for one in prompts]


class PromptTokens(Struct, frozen=True, kw_only=True):
    """A prompt of vLLM's that is token ids already."""

    prompt_token_ids: list[TokenId]


class VllmRequest(_Sampling, frozen=True, kw_only=True):
    """POST /generate as clients of vLLM's API server write it."""

    prompt: str | PromptTokens
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    model: Any = None
    min_tokens: Any = None

    @property
    def params(self) -> SamplingParams:
        """As `_params`."""
        return self._params(
            _limit(self.max_tokens, _COMPLETION_TOKENS),
            self.seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class SglangSampling(_Sampling, frozen=True, kw_only=True):
    """`sampling_params` of an `SglangRequest`."""

    max_new_tokens: int | None = None
    sampling_seed: int | None = None
    min_new_tokens: Any = None
    json_schema: Any = None
    regex: Any = None


class SglangRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /generate as clients of SGLang write it, for one prompt."""

    input_ids: list[TokenId] | None = None
    text: str | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    logprob_start_len: Any = None
    top_logprobs_num: int = 0
    stream: bool = False
    rid: str | None = None

    def __post_init__(self) -> None:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("exactly one of input_ids and text must be given")

    @property
    def params(self) -> SamplingParams:
        """As `_params`."""
        asked, top = self.sampling_params, self.top_logprobs_num if self.return_logprob else None
        return asked._params(_limit(asked.max_new_tokens, _SGLANG_TOKENS), asked.sampling_seed, logprobs=top)  # noqa: SLF001


def _limit(given: int | None, default: int) -> int:
    return default if given is None else given


def template_messages(messages: list[dict[str, Any]], *, as_text: bool = False) -> list[dict[str, Any]]:
    """Return the messages as chat templates want them, from all that OpenAI's schema allows.

    Text is in one piece, also where there is none (an answer that is calls of tools alone), arguments of tool calls are
    objects (with `as_text` their JSON, which some templates want), and a field that is null or an empty list of calls
    counts as absent. Raises `DataError` for content that is no text, and for arguments that are no object.
    """
    check_plain("messages", messages)
    return [_template_message(number, message, as_text) for number, message in enumerate(messages)]


def _template_message(number: int, message: dict[str, Any], as_text: bool) -> dict[str, Any]:
    found = {name: value for name, value in message.items() if value is not None and value != []}
    content, refusal = message.get("content"), found.pop("refusal", None)
    if isinstance(content, list):
        content = "".join(map(_text_part, content))
    if content is None:
        if message.get("role") in {"system", "developer", "user", "tool"}:
            raise DataError(f"messages[{number}] has no content; only an assistant's message may be without.")
        content = refusal if isinstance(refusal, str) else ""
    found["content"] = content
    if isinstance(call := found.pop("function_call", None), dict):
        found["tool_calls"] = [{"type": "function", "function": call}]
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_template_call(call, as_text) for call in calls]
    return found


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in {"text", "refusal"} or not isinstance(part.get(kind), str):
        raise DataError(f"content of type {kind!r:.40} is not served; this model reads text alone.")
    text: str = part[kind]
    return text


def _template_call(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments, name = function["arguments"], function.get("name")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.MsgspecError, RecursionError) as error:
            raise DataError(f"arguments of the tool call {name!r:.60} are not JSON: {error}") from error
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise DataError(f"arguments of the tool call {name!r:.60} are no JSON object, but {arguments!r:.60}.")
    written = msgspec.json.encode(arguments).decode() if as_text else arguments
    return {**call, "function": {**function, "arguments": written}}
