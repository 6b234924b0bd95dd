"""OpenAI's chat completions: requests, answers and streams. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.pipeline.extensions.endpoint.logic.conversation import (
    AnswerSample,
    ChatMessage,
    ModelAnswer,
    ModelRequest,
)
from lachesis.pipeline.extensions.endpoint.logic.dialects.dialect import (
    FieldRules,
    StreamEvent,
    forced_by_word,
    forced_names,
    json_format,
    optional,
    tool_call,
    typed,
    typed_texts,
)
from lachesis.pipeline.extensions.endpoint.logic.dialects.openai_errors import openai_error
from lachesis.schemas.errors import DataError

__all__ = ["OpenAiChat"]

_REQUEST = FieldRules(
    read=frozenset({
        "messages", "model", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "seed", "temperature",
        "top_p", "stream", "stream_options", "logprobs", "response_format", "tool_choice",
    }),
    without_effect=frozenset({
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier", "store", "user",
    }),
    neutral={
        "frequency_penalty": (0,),
        "function_call": ("auto", "none"),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "presence_penalty": (0,),
        "reasoning_effort": (),
        "top_logprobs": (0,),
        "verbosity": ("medium",),
    },
)  # fmt: skip
_MESSAGE = FieldRules(
    read=frozenset({"role", "content", "name", "tool_calls", "tool_call_id"}),
    without_effect=frozenset({"annotations"}),
    neutral={"audio": (), "function_call": (), "refusal": ("",)},
)
_TOOL = FieldRules(frozenset({"type", "function"}))
_FUNCTION = FieldRules(frozenset({"name", "description", "parameters"}), frozenset({"strict"}))
_CALL = FieldRules(frozenset({"id", "type", "function"}), frozenset({"index"}))
_CALLED = FieldRules(frozenset({"name", "arguments"}))
_STREAM = FieldRules(frozenset({"include_usage"}), frozenset({"include_obfuscation"}))
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = ("text", "refusal")


class OpenAiChat:
    """See `Dialect`."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect`."""
        _REQUEST.check(body)
        options = typed(body, "stream_options", dict[str, Any], {})
        _STREAM.check(options, "stream_options.")
        stop = body.get("stop")
        choice, given = body.get("tool_choice"), body.get("response_format")
        tools = [] if choice == "none" else _tools(typed(body, "tools", list[dict[str, Any]], []))
        limit = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        return ModelRequest(
            messages=[_message(i, one) for i, one in enumerate(typed(body, "messages", list[dict[str, Any]], []))],
            tools=tools,
            forced_tools=_forced(choice, tools),
            answer_schema=None if given is None else json_format("response_format", given, "json_schema"),
            model=typed(body, "model", str, "policy"),
            n=typed(body, "n", int, 1),
            max_tokens=optional(body, limit, int),
            stop=[stop] if isinstance(stop, str) else typed(body, "stop", list[str], []),
            seed=optional(body, "seed", int),
            temperature=optional(body, "temperature", float),
            top_p=optional(body, "top_p", float),
            stream=typed(body, "stream", bool, False),
            include_usage=options.get("include_usage") is True,
            logprobs=typed(body, "logprobs", bool, False),
        )

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        """See `Dialect`."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "refusal": None, **_said(sample)},
                "logprobs": _logprobs(sample) if request.logprobs else None,
                "finish_reason": _finish_reason(sample),
            }
            for index, sample in enumerate(answer.samples)
        ]
        return _head(request, answer, "chat.completion") | {"choices": choices, "usage": _usage(answer)}

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """See `Dialect`. Each sample comes in one piece: it is recorded as a whole before any of it is sent."""
        head = _head(request, answer, "chat.completion.chunk")

        def chunk(index: int, delta: dict[str, Any], **more: Any) -> StreamEvent:
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
            return StreamEvent(None, head | {"choices": [choice]})

        for index, sample in enumerate(answer.samples):
            said = _said(sample)
            yield chunk(index, {"role": "assistant", "content": ""})
            logprobs = _logprobs(sample) if request.logprobs else None
            if said["content"] or logprobs:
                yield chunk(index, {"content": said["content"] or ""}, logprobs=logprobs)
            for place, call in enumerate(said.get("tool_calls", [])):
                yield chunk(index, {"tool_calls": [{"index": place, **call}]})
            yield chunk(index, {}, finish_reason=_finish_reason(sample))
        if request.include_usage:
            yield StreamEvent(None, head | {"choices": [], "usage": _usage(answer)})
        yield StreamEvent(None, None)

    def error(self, status: int, text: str, code: str | None = None) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(status, text, code)

    def error_event(self, status: int, text: str) -> StreamEvent:
        """See `Dialect`."""
        return StreamEvent(None, openai_error(status, text))


def _message(number: int, given: dict[str, Any]) -> ChatMessage:
    where = f"messages[{number}]"
    _MESSAGE.check(given, f"{where}.")
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise DataError(f"{where}.role is {given.get('role')!r:.60}; it must be one of {', '.join(_ROLES)}")
    content, calls = given.get("content"), typed(given, "tool_calls", list[dict[str, Any]], [])
    if content is None and role != "assistant":
        raise DataError(f"{where} has no content; only an assistant's message may be without")
    return ChatMessage(
        role=role,
        content="" if content is None else typed_texts(content, f"{where}.content", _PARTS),
        name=optional(given, "name", str),
        tool_calls=[_call(one, where) for one in calls],
        tool_call_id=optional(given, "tool_call_id", str),
    )


def _call(given: dict[str, Any], where: str) -> Any:
    function = given.get("function")
    if not isinstance(function, dict):
        raise DataError(f"{where} has a tool call of type {given.get('type')!r:.60}; functions alone are served")
    _CALL.check(given, f"{where}.tool_calls: ")
    _CALLED.check(function, f"{where}.tool_calls: function.")
    return tool_call(function.get("name"), function.get("arguments"), given.get("id"), where)


def _tools(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for number, tool in enumerate(given):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise DataError(f"tools[{number}] is of type {tool.get('type')!r:.60}; functions alone are served")
        _TOOL.check(tool, f"tools[{number}].")
        _FUNCTION.check(function, f"tools[{number}].function.")
    return [{"type": "function", "function": {k: v for k, v in t["function"].items() if k != "strict"}} for t in given]


def _forced(choice: Any, tools: list[dict[str, Any]]) -> list[str]:
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return forced_names(tools, name)
    return forced_by_word(choice, tools)


def _head(request: ModelRequest, answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created_s, "model": request.model}


def _said(sample: AnswerSample) -> dict[str, Any]:
    message = sample.message
    if not message.tool_calls:
        return {"content": message.text}
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
        for one in message.tool_calls
    ]
    return {"content": message.text or None, "tool_calls": calls}


def _finish_reason(sample: AnswerSample) -> str:
    return "tool_calls" if sample.message.tool_calls and sample.finish_reason == "stop" else sample.finish_reason


def _logprobs(sample: AnswerSample) -> dict[str, Any]:
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in sample.logprobs
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ModelAnswer) -> dict[str, int]:
    prompt, completion = answer.prompt_tokens, answer.tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
