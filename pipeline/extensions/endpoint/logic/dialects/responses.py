"""OpenAI's responses: requests, answers and streams. Pure."""

import itertools
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

__all__ = ["OpenAiResponses"]

_REQUEST = FieldRules(
    read=frozenset({
        "input", "instructions", "model", "tools", "max_output_tokens", "temperature", "top_p", "stream",
        "previous_response_id", "text", "tool_choice", "include",
    }),
    without_effect=frozenset({
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "safety_identifier", "service_tier", "store", "stream_options", "user",
    }),
    neutral={
        "background": (False,),
        "reasoning": ({},),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
)  # fmt: skip
_TEXT = FieldRules(read=frozenset({"format"}), neutral={"verbosity": ("medium",)})
_TOOL = FieldRules(
    read=frozenset({"type", "name", "description", "parameters"}),
    without_effect=frozenset({"strict"}),
    neutral={"defer_loading": (False,), "allowed_callers": (["direct"],), "output_schema": ()},
)
_OF_ITEM = frozenset({"id", "status"})
_ITEMS = {
    "message": FieldRules(frozenset({"type", "role", "content"}), _OF_ITEM),
    "reasoning": FieldRules(frozenset({"type", "content", "summary"}), _OF_ITEM, {"encrypted_content": ("",)}),
    "function_call": FieldRules(frozenset({"type", "name", "arguments", "call_id"}), _OF_ITEM),
    "function_call_output": FieldRules(frozenset({"type", "call_id", "output"}), _OF_ITEM),
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDES = frozenset({
    _LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
})  # fmt: skip
"""What a request may include beside the answer: logprobs. The rest belongs to what is not served, so it is empty."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text", "text", "refusal")
_PREFIX = "resp_"


class OpenAiResponses:
    """See `Dialect`."""

    path = "/v1/responses"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect`."""
        _REQUEST.check(body)
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise DataError(f"input is {given!r:.60}; it must be text, or a list of items")
        messages = _merged([_item(number, item) for number, item in enumerate(items)])
        if instructions := typed(body, "instructions", str, ""):
            messages.insert(0, ChatMessage(role="system", content=instructions))
        tools = [_tool(number, one) for number, one in enumerate(typed(body, "tools", list[dict[str, Any]], []))]
        choice, text = body.get("tool_choice"), typed(body, "text", dict[str, Any], {})
        _TEXT.check(text, "text.")
        given = text.get("format")
        include = typed(body, "include", list[str], [])
        if unknown := set(include) - _INCLUDES:
            raise DataError(f"include names {min(unknown)!r:.60}, which is not known here; leave it out")
        tools = [] if choice == "none" else tools
        previous = typed(body, "previous_response_id", str, "")
        return ModelRequest(
            messages=messages,
            tools=tools,
            forced_tools=_forced(choice, tools),
            answer_schema=None if given is None else json_format("text.format", given),
            model=typed(body, "model", str, "policy"),
            max_tokens=optional(body, "max_output_tokens", int),
            temperature=optional(body, "temperature", float),
            top_p=optional(body, "top_p", float),
            stream=typed(body, "stream", bool, False),
            follows=previous.removeprefix(_PREFIX) or None,
            logprobs=_LOGPROBS in include,
        )

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        """See `Dialect`."""
        (sample,) = answer.samples
        is_cut = sample.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.tokens,
        }
        return _head(request, answer, status) | {
            "output": _output(request, answer, sample),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": usage,
        }

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """See `Dialect`. Each item comes in one piece: it is recorded as a whole before any of it is sent."""
        whole = self.answer(request, answer)
        begun = _head(request, answer, "in_progress") | {"output": [], "usage": None}
        pieces: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": begun}),
            ("response.in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            pieces += _pieces(index, item)
        ending = "response.incomplete" if whole["incomplete_details"] else "response.completed"
        pieces.append((ending, {"response": whole}))
        for number, (name, data) in enumerate(pieces):
            yield StreamEvent(name, {"type": name, "sequence_number": number, **data})

    def error(self, status: int, text: str, code: str | None = None) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(status, text, code)

    def error_event(self, status: int, text: str) -> StreamEvent:
        """See `Dialect`."""
        data = {"type": "error", "code": openai_error(status, text)["error"]["type"], "message": text, "param": None}
        return StreamEvent("error", data | {"sequence_number": 0})


def _item(number: int, item: dict[str, Any]) -> ChatMessage:
    where, kind = f"input[{number}]", item.get("type", "message")
    if isinstance(kind, str) and kind in _ITEMS:
        _ITEMS[kind].check(item, f"{where}.")
    match kind:
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise DataError(f"{where}.role is {item.get('role')!r:.60}; it must be one of {', '.join(_ROLES)}")
            return ChatMessage(role=role, content=typed_texts(item.get("content"), f"{where}.content", _PARTS))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            return ChatMessage(
                role="assistant",
                content="",
                thinking=typed_texts(parts, f"{where}.content", ("reasoning_text", "summary_text")),
            )
        case "function_call":
            call = tool_call(item.get("name"), item.get("arguments"), item.get("call_id"), where)
            return ChatMessage(role="assistant", content="", tool_calls=[call])
        case "function_call_output":
            text = typed_texts(item.get("output"), f"{where}.output", _PARTS)
            return ChatMessage(role="tool", content=text, tool_call_id=str(item.get("call_id")))
        case kind:
            raise DataError(f"{where} is of type {kind!r:.60}; messages, reasoning and calls of functions are served")


def _merged(items: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages in which the items of one turn of the assistant, which follow one another, are one."""
    found: list[ChatMessage] = []
    for is_answer, turn in itertools.groupby(items, lambda item: item.role == "assistant"):
        if not is_answer:
            found += turn
            continue
        parts = list(turn)
        merged = ChatMessage(
            role="assistant",
            content="".join(part.content for part in parts),
            thinking="".join(part.thinking for part in parts),
            tool_calls=[call for part in parts for call in part.tool_calls],
        )
        found.append(merged)
    return found


def _tool(number: int, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("type") != "function" or not isinstance(given.get("name"), str):
        raise DataError(f"tools[{number}] is of type {given.get('type')!r:.60}; functions alone are served")
    _TOOL.check(given, f"tools[{number}].")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {name: given[name] for name in names if given.get(name) is not None}}


def _forced(choice: Any, tools: list[dict[str, Any]]) -> list[str]:
    match choice:
        case {"type": "function", "name": str(name)}:
            return forced_names(tools, name)
    return forced_by_word(choice, tools)


def _head(request: ModelRequest, answer: ModelAnswer, status: str) -> dict[str, Any]:
    return {
        "id": f"{_PREFIX}{answer.id}",
        "object": "response",
        "created_at": answer.created_s,
        "status": status,
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": None if request.follows is None else f"{_PREFIX}{request.follows}",
        "temperature": request.temperature,
        "tool_choice": "required" if request.forced_tools else "auto",
        "tools": [{"strict": False, "type": "function", **tool["function"]} for tool in request.tools],
        "top_p": request.top_p,
    }


def _logprobs(sample: AnswerSample) -> list[dict[str, Any]]:
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in sample.logprobs
    ]


def _output(request: ModelRequest, answer: ModelAnswer, sample: AnswerSample) -> list[dict[str, Any]]:
    message, found = sample.message, list[dict[str, Any]]()
    if message.thinking:
        content = [{"type": "reasoning_text", "text": message.thinking}]
        found.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": content})
    if message.content or not (message.thinking or message.tool_calls):
        logprobs = _logprobs(sample) if request.logprobs else []
        text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": logprobs}
        status = "incomplete" if sample.finish_reason == "length" else "completed"
        found.append(
            {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status, "content": [text]}
        )
    return found + [
        {
            "id": f"fc_{call.id}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for call in message.tool_calls
    ]


def _pieces(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one item of the output."""
    place = {"output_index": index, "item_id": item["id"]}
    match item["type"]:
        case "function_call":
            yield "response.output_item.added", {"output_index": index, "item": item | {"arguments": ""}}
            yield "response.function_call_arguments.delta", place | {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", place | done
        case kind:
            name = "output_text" if kind == "message" else "reasoning_text"
            (part,) = item["content"]
            at = place | {"content_index": 0}
            more: dict[str, Any] = {"logprobs": part["logprobs"]} if kind == "message" else {}
            yield "response.output_item.added", {"output_index": index, "item": item | {"content": []}}
            yield "response.content_part.added", at | {"part": part | {"text": ""} | ({"logprobs": []} if more else {})}
            yield f"response.{name}.delta", at | more | {"delta": part["text"]}
            yield f"response.{name}.done", at | more | {"text": part["text"]}
            yield "response.content_part.done", at | {"part": part}
    yield "response.output_item.done", {"output_index": index, "item": item}
