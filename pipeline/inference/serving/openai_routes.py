"""OpenAI's routes over the engine: chat completions and completions, whole or streamed.

Guarantees that `return_token_ids` and `logprobs` are those of the tokens as they were sampled, never of text that was
tokenized again; that the pieces of a stream add up to the text of an answer that is not streamed; and that the work of
a client that hangs up is dropped. The chat template names the tools to the model. Calls are read as
`<tool_call>{...}</tool_call>`, unless the model only thinks of them or shows them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Container, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.inference.protocol import PromptLogprobs, TokenizeRequest
from lachesis.pipeline.inference.serving.dialects import ChatRequest, CompletionRequest
from lachesis.pipeline.inference.serving.engine import SamplingEngine
from lachesis.pipeline.inference.serving.event_stream import EventStream, SampledTokens
from lachesis.pipeline.inference.serving.replies import body_of, generated
from lachesis.pipeline.inference.serving.results import GenerationResult, SampledToken, SampleResult
from lachesis.pipeline.inference.serving.sampling_notice import REQUESTED_SAMPLING
from lachesis.pipeline.inference.serving.text import GrowingText, SampleTexts
from lachesis.pipeline.inference.serving.text_tokenizer import Encode
from lachesis.pipeline.tasks.marked_calls import CALL_TOKENS, may_be_marked_call
from lachesis.pipeline.tasks.thoughts import PROMPT_END_TOKENS, opened_thought
from lachesis.pipeline.tasks.tool_calls import CALL_MARKER, parse_tool_calls, text_without_calls
from lachesis.schemas.rollout import ToolCall

__all__ = ["OpenAiRoutes"]

_CHAT = "chat.completion"
_TEXT = "text_completion"


class OpenAiRoutes:
    """Handlers of the routes. `names`: names of the model; answers use the first."""

    def __init__(
        self,
        engine: SamplingEngine,
        tokenizer: Any,
        encode: Encode,
        names: Sequence[str],
        end_tokens: Container[int] = (),
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._encode = encode
        self._names = names
        self._end_tokens = end_tokens

    async def chat_completions(self, request: Request) -> Any:
        """Answer POST /v1/chat/completions."""
        body = await body_of(request, ChatRequest)
        self._check_model(body.model)
        params, tools = body.params, body.usable_tools
        wanted = TokenizeRequest(
            messages=body.messages,
            tools=tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        prompt = await self._encode(wanted)
        answer = self._answer(body, tools=bool(tools))
        answer.opened = bool(opened_thought(self._tokenizer.decode(prompt[-PROMPT_END_TOKENS:])))
        if body.stream:
            return self._stream(request, prompt, body, answer)
        (result,) = await generated(request, self._engine, [prompt], params)
        reply = answer.head(_CHAT) | {
            "choices": [answer.chat_choice(index, sample) for index, sample in enumerate(result.samples)],
            "usage": _usage([prompt], [result]),
        }
        return reply | ({"prompt_token_ids": prompt} if body.return_token_ids else {})

    async def completions(self, request: Request) -> Any:
        """Answer POST /v1/completions."""
        body = await body_of(request, CompletionRequest)
        self._check_model(body.model)
        params = body.params
        prompts = [
            await self._encode(TokenizeRequest(prompt=one)) if isinstance(one, str) else one for one in body.prompts
        ]
        answer = self._answer(body)
        if body.stream and len(prompts) == 1 and not body.echo:
            return self._stream(request, prompts[0], body, answer)
        results = await generated(request, self._engine, prompts, params)
        if body.only_echoes:
            results = [replace(one, samples=list(map(_without_tokens, one.samples))) for one in results]
        echoes = [
            answer.echo(given if isinstance(given, str) else None, prompt, result.prompt_logprobs)
            for given, prompt, result in zip(body.prompts, prompts, results, strict=True)
        ] if body.echo else [None] * len(prompts)  # fmt: skip
        choices = [
            answer.text_choice(at * params.n + index, sample, prompt, echo)
            for at, (prompt, result, echo) in enumerate(zip(prompts, results, echoes, strict=True))
            for index, sample in enumerate(result.samples)
        ]
        whole = answer.head(_TEXT) | {"choices": choices, "usage": _usage(prompts, results)}
        return EventStream(_once(whole)) if body.stream else whole

    def _answer(self, body: ChatRequest | CompletionRequest, *, tools: bool = False) -> _Answer:
        texts = SampleTexts.of(self._tokenizer, self._end_tokens, skip_special_tokens=body.skip_special_tokens)
        return _Answer(self._tokenizer, body, self._names[0], texts, tools=tools)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self._names:
            raise NotFoundError(f"the model {name[:200]!r} is not served here; this is {' or '.join(self._names)}.")

    def _stream(
        self, request: Request, prompt: list[int], body: ChatRequest | CompletionRequest, answer: _Answer
    ) -> Response:
        params = body.params
        usage = body.stream_options is not None and body.stream_options.include_usage
        chunk = answer.chat_chunk if isinstance(body, ChatRequest) else answer.text_chunk
        kind = f"{_CHAT}.chunk" if isinstance(body, ChatRequest) else _TEXT
        tokens = SampledTokens(self._engine, prompt, params)
        future = tokens.future

        async def events() -> AsyncIterator[dict[str, Any]]:
            texts: dict[int, GrowingText] = {}
            async for token in tokens:
                first = token.sample not in texts
                text = texts.setdefault(token.sample, GrowingText(params.stop, answer.texts.shown, answer.texts.whole))
                yield answer.head(kind) | {"choices": [chunk(token, text, prompt if first else None)]}
            if future.cancelled():
                return  # the client has hung up
            result = future.result()
            request.state.generation, request.state.input_tokens = result, len(prompt)
            for index, sample in enumerate(result.samples):
                if sample.finish_reason == "abort":
                    yield answer.head(kind) | {"choices": [answer.aborted(index, chat=isinstance(body, ChatRequest))]}
            if usage:
                yield answer.head(kind) | {"choices": [], "usage": _usage([prompt], [result])}

        request.state.items = params.n
        setattr(request.state, REQUESTED_SAMPLING, params)
        return EventStream(events(), future)


async def _once(value: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield value


class _Answer:
    """Puts samples into the shapes of one answer."""

    def __init__(
        self,
        tokenizer: Any,
        body: ChatRequest | CompletionRequest,
        model: str,
        texts: SampleTexts,
        *,
        tools: bool = False,
    ) -> None:
        self.texts = texts
        self._tokenizer = tokenizer
        self._body = body
        self._model = model
        self._tools = tools
        self.opened = False
        """Whether the prompt ends in a thought that the template opened."""
        self._id = uuid.uuid4().hex
        self._created = int(time.time())
        self._wants_logprobs = body.params.logprobs is not None

    def head(self, kind: str) -> dict[str, Any]:
        prefix = "cmpl" if kind == _TEXT else "chatcmpl"
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self._model}

    def chat_choice(self, index: int, sample: SampleResult) -> dict[str, Any]:
        message, finish_reason = self._message(self._text(sample), sample.finish_reason, sample.token_ids)
        return self._choice(index, sample, finish_reason) | {
            "message": {"role": "assistant"} | message,
            "logprobs": self._chat_logprobs(sample.token_ids, sample.logprobs, sample.top_logprobs),
        }

    def text_choice(self, index: int, sample: SampleResult, prompt: list[int], echo: _Echo | None) -> dict[str, Any]:
        text = "" if echo is None else echo.text
        logprobs = self._text_logprobs(sample.token_ids, sample.logprobs, sample.top_logprobs, len(text))
        if echo is not None and logprobs is not None and echo.logprobs is not None:
            logprobs = {name: [*before, *logprobs[name]] for name, before in echo.logprobs.items()}
        return self._choice(index, sample, sample.finish_reason) | {
            "text": text + self._text(sample),
            "logprobs": logprobs,
            **({"prompt_token_ids": prompt} if self._body.return_token_ids else {}),
        }

    def echo(self, given: str | None, prompt: list[int], scores: PromptLogprobs | None) -> _Echo:
        """Return a prompt as it stands before its answers; `given` is its text where it was one.

        The first token has no logprob: nothing stands before it.
        """
        text: str = self._tokenizer.decode(prompt) if given is None else given
        if scores is None:
            return _Echo(text, None)
        own = [
            None if score is None else score[str(token)].logprob for token, score in zip(prompt, scores, strict=True)
        ]
        tops = [
            None if score is None else [(int(token), found.logprob) for token, found in score.items()]
            for score in scores
        ]
        found = self._text_logprobs(prompt, own, tops, 0)
        if found is not None:
            found["text_offset"] = [min(offset, len(text)) for offset in found["text_offset"]]
        return _Echo(text, found)

    def chat_chunk(self, token: SampledToken, text: GrowingText, prompt: list[int] | None) -> dict[str, Any]:
        """Return the choice of the event that one token makes; `prompt` with a sample's first.

        With tools, the text is sent at the end.
        """
        piece = self._piece(token, text)
        delta: dict[str, Any] = {} if prompt is None else {"role": "assistant", "content": ""}
        finish_reason: str | None = token.finish_reason
        if not self._tools:
            delta |= {"content": piece} if piece else {}
        elif finish_reason is not None:
            message, finish_reason = self._message(text.shown, finish_reason, text.tokens)
            calls = [{"index": at} | call for at, call in enumerate(message.pop("tool_calls", []))]
            delta |= message | ({"tool_calls": calls} if calls else {})
        logprobs = self._chat_logprobs([token.token_id], [token.logprob], [token.top_logprobs])
        return self._chunk(token, finish_reason, logprobs, prompt) | {"delta": delta}

    def text_chunk(self, token: SampledToken, text: GrowingText, prompt: list[int] | None) -> dict[str, Any]:
        """Return the choice of the event that one token makes; `prompt` with a sample's first."""
        start = len(text.shown)
        piece = self._piece(token, text)
        logprobs = self._text_logprobs([token.token_id], [token.logprob], [token.top_logprobs], start)
        return self._chunk(token, token.finish_reason, logprobs, prompt) | {"text": piece}

    def aborted(self, index: int, *, chat: bool) -> dict[str, Any]:
        """Return the choice of the event that ends a sample which was cut off by a pause."""
        return {"index": index, "finish_reason": "abort", **({"delta": {}} if chat else {"text": ""})}

    def _text(self, sample: SampleResult) -> str:
        return self.texts.text(sample.token_ids, sample.finish_reason, sample.stop_reason)

    def _piece(self, token: SampledToken, text: GrowingText) -> str:
        ended = token.finish_reason == "stop" and token.stop_reason is None and token.token_id in self.texts.end_tokens
        piece = "" if ended or isinstance(token.stop_reason, int) else text.append(token.token_id)
        return piece + text.finish(token.stop_reason) if token.finish_reason is not None else piece

    def _message(
        self, text: str, finish_reason: str | None, tokens: Sequence[int]
    ) -> tuple[dict[str, Any], str | None]:
        """Return the assistant's text, its tool calls separately, and how it ended."""
        calls: list[ToolCall] = []
        if self._tools:
            calls = parse_tool_calls(text, whole=self._tokenizer.decode(list(tokens)), opened=self.opened).calls
        if not calls:
            return {"content": text}, finish_reason
        named = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
        content = text_without_calls(self._before_call_token(text, tokens), opened=self.opened) or None
        return {"content": content, "tool_calls": named}, "tool_calls" if finish_reason == "stop" else finish_reason

    def _before_call_token(self, text: str, tokens: Sequence[int]) -> str:
        """Return the text before a special token that begins calls; all of it if there is none."""
        if CALL_MARKER in text or not may_be_marked_call(text):
            return text
        place = next((i for i, one in enumerate(tokens) if self._tokenizer.decode([one]).strip() in CALL_TOKENS), None)
        return text if place is None else self.texts.text(list(tokens[:place]), None, None)

    def _choice(self, index: int, sample: SampleResult, finish_reason: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "finish_reason": finish_reason, "stop_reason": sample.stop_reason}
        if self._body.return_token_ids:
            found |= {"token_ids": sample.token_ids, "weight_versions": sample.weight_versions}
        return found

    def _chunk(
        self, token: SampledToken, finish_reason: str | None, logprobs: Any, prompt: list[int] | None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"index": token.sample, "finish_reason": finish_reason, "logprobs": logprobs}
        if token.finish_reason is not None:
            found["stop_reason"] = token.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = [token.token_id]
            if prompt is not None:
                found["prompt_token_ids"] = prompt
        return found

    def _name(self, token: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        text: str = self._tokenizer.decode([token])
        return text

    def _chat_logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[list[tuple[int, float]]]
    ) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None

        def entry(token: int, logprob: float) -> dict[str, Any]:
            name = self._name(token)
            return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

        content = [
            entry(token, logprob) | {"top_logprobs": [entry(*pair) for pair in top]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]
        return {"content": content}

    def _text_logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[list[tuple[int, float]] | None],
        start: int,
    ) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        names = [self._name(token) for token in tokens]
        offsets = [start][: len(tokens)]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(self.texts.shown([token])))
        return {
            "tokens": names,
            "token_logprobs": list(logprobs),
            "top_logprobs": [None if top is None else self._by_name(top) for top in tops],
            "text_offset": offsets,
        }

    def _by_name(self, top: list[tuple[int, float]]) -> dict[str, float]:
        """Return logprobs by their tokens' texts. Of several tokens of one text the likeliest counts."""
        found: dict[str, float] = {}
        for token, value in top:
            found[self._name(token)] = max(value, found.get(self._name(token), value))
        return found


class _Echo(NamedTuple):
    """A prompt before its answers: its text, and the logprobs of its tokens as answers have them, if wanted."""

    text: str
    logprobs: dict[str, Any] | None


def _without_tokens(sample: SampleResult) -> SampleResult:
    return replace(
        sample, token_ids=[], logprobs=[], top_logprobs=[], finish_reason="length", stop_reason=None, weight_versions=[]
    )


def _usage(prompts: Sequence[list[int]], results: Sequence[GenerationResult]) -> dict[str, int]:
    read = sum(map(len, prompts))
    written = sum(len(sample.token_ids) for result in results for sample in result.samples)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
