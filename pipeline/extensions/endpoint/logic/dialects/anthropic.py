"""Anthropic's messages: requests, answers and streams. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from lachesis.pipeline.extensions.endpoint.logic.conversation import (
    AnswerSample,
    ChatMessage,
    ModelAnswer,
    ModelRequest,
)
from lachesis.pipeline.extensions.endpoint.logic.dialects.dialect import (
    FieldRules,
    StreamEvent,
    forced_names,
    optional,
    tool_call,
    typed,
    typed_texts,
)
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import ToolCall

__all__ = ["AnthropicMessages"]

_REQUEST = FieldRules(
    read=frozenset({
        "messages", "model", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "temperature", "top_p",
        "stream",
    }),
    without_effect=frozenset({"cache_control", "diagnostics", "metadata", "service_tier", "thinking"}),
    neutral={"top_k": (0, -1), "mcp_servers": ([],), "betas": ([],), "speed": ("standard",), "output_config": ({},)},
)  # fmt: skip
_TOOL = FieldRules(
    read=frozenset({"name", "description", "input_schema", "type"}),
    without_effect=frozenset({"cache_control", "eager_input_streaming", "strict"}),
    neutral={"defer_loading": (False,), "allowed_callers": (["direct"],), "input_examples": ([],)},
)
_BLOCKS = {
    "thinking": FieldRules(frozenset({"type", "thinking"}), frozenset({"signature"})),
    "text": FieldRules(frozenset({"type", "text"}), frozenset({"cache_control"}), {"citations": ([],)}),
    "tool_use": FieldRules(
        frozenset({"type", "id", "name", "input"}), frozenset({"cache_control"}), {"caller": ({"type": "direct"},)}
    ),
    "tool_result": FieldRules(frozenset({"type", "tool_use_id", "content", "is_error"}), frozenset({"cache_control"})),
}
_CHOICE = FieldRules(frozenset({"type", "name"}), frozenset({"disable_parallel_tool_use"}))
_ERROR = "Error: "
"""What the model reads before the result of a tool that says `is_error`: chat templates have no place for that."""
_MARK = "lachesis"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicMessages:
    """See `Dialect`."""

    path = "/v1/messages"

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """See `Dialect`."""
        _REQUEST.check(body)
        choice = typed(body, "tool_choice", dict[str, Any], {"type": "auto"})
        messages = []
        if (system := body.get("system")) is not None:
            messages.append(ChatMessage(role="system", content=typed_texts(system, "system", ("text",))))
        for number, given in enumerate(typed(body, "messages", list[dict[str, Any]], [])):
            messages += _messages(number, given)
        tools = [_tool(number, one) for number, one in enumerate(typed(body, "tools", list[dict[str, Any]], []))]
        return ModelRequest(
            messages=messages,
            tools=[] if choice.get("type") == "none" else tools,
            forced_tools=_forced(choice, tools),
            model=typed(body, "model", str, "policy"),
            max_tokens=optional(body, "max_tokens", int),
            stop=typed(body, "stop_sequences", list[str], []),
            temperature=optional(body, "temperature", float),
            top_p=optional(body, "top_p", float),
            stream=typed(body, "stream", bool, False),
        )

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        """See `Dialect`."""
        (sample,) = answer.samples
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.tokens}
        return _message(request, answer) | {"content": _blocks(sample), **_ending(sample), "usage": usage}

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """See `Dialect`. Each block comes in one piece: it is recorded as a whole before any of it is sent."""
        (sample,) = answer.samples
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
        yield _event("message_start", message=_message(request, answer) | begun | {"usage": usage})
        for index, block in enumerate(_blocks(sample)):
            empty, deltas = _deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_ending(sample), usage={"output_tokens": answer.tokens})
        yield _event("message_stop")

    def error(self, status: int, text: str, code: str | None = None) -> dict[str, Any]:
        """See `Dialect`."""
        return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": text}}

    def error_event(self, status: int, text: str) -> StreamEvent:
        """See `Dialect`."""
        return StreamEvent("error", self.error(status, text))


def _event(name: str, **data: Any) -> StreamEvent:
    return StreamEvent(name, {"type": name, **data})


def _messages(number: int, given: dict[str, Any]) -> list[ChatMessage]:
    """Return what one message of Anthropic's holds: results of tools are messages of their own here."""
    where, role, content = f"messages[{number}]", given.get("role"), given.get("content")
    FieldRules(frozenset({"role", "content"})).check(given, f"{where}.")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise DataError(f"{where}.content is {content!r:.60}; it must be text, or a list of blocks")
    if role == "assistant":
        return [_assistant(where, blocks)]
    if role == "system":
        return [ChatMessage(role="system", content=typed_texts(blocks, f"{where}.content", ("text",)))]
    if role != "user":
        raise DataError(f"{where}.role is {role!r:.60}; it must be user or assistant")
    found: list[ChatMessage] = []
    texts: list[Any] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(block)
            continue
        _BLOCKS["tool_result"].check(block, f"{where}: tool_result.")
        result = block.get("content")
        text = "" if result is None else typed_texts(result, f"{where}: the result of a tool", ("text",))
        text = _ERROR + text if typed(block, "is_error", bool, False) else text
        found.append(ChatMessage(role="tool", content=text, tool_call_id=str(block.get("tool_use_id"))))
    if texts or not found:
        found.append(ChatMessage(role="user", content=typed_texts(texts, f"{where}.content", ("text",))))
    return found


def _assistant(where: str, blocks: list[dict[str, Any]]) -> ChatMessage:
    thinking = content = ""
    calls: list[ToolCall] = []
    for block in blocks:
        match block.get("type"):
            case "thinking" if isinstance(block.get("thinking"), str) and not content and not calls:
                thinking += block["thinking"]
            case "text" if isinstance(block.get("text"), str) and not calls:
                content += block["text"]
            case "tool_use":
                calls.append(tool_call(block.get("name"), block.get("input"), block.get("id"), where))
            case kind:
                raise DataError(
                    f"{where}.content has a block of type {kind!r:.60} there; an assistant's message is thinking, then "
                    "text, then calls of tools"
                )
        _BLOCKS[block["type"]].check(block, f"{where}: {block['type']}.")
    return ChatMessage(role="assistant", content=content, thinking=thinking, tool_calls=calls)


def _forced(choice: dict[str, Any], tools: list[dict[str, Any]]) -> list[str]:
    _CHOICE.check(choice, "tool_choice.")
    match choice:
        case {"type": "auto" | "none"}:
            return []
        case {"type": "any"}:
            return forced_names(tools)
        case {"type": "tool", "name": str(name)}:
            return forced_names(tools, name)
    raise DataError(f"tool_choice is {choice!r:.60}; the types auto, none, any, and tool with a name are served")


def _tool(number: int, given: dict[str, Any]) -> dict[str, Any]:
    _TOOL.check(given, f"tools[{number}].")
    if given.get("type") not in (None, "custom") or not isinstance(given.get("name"), str):
        raise DataError(f"tools[{number}] is of type {given.get('type')!r:.60}; tools of the client alone are served")
    function = {"name": given["name"], "parameters": given.get("input_schema") or {"type": "object", "properties": {}}}
    if given.get("description") is not None:
        function["description"] = given["description"]
    return {"type": "function", "function": function}


def _message(request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(sample: AnswerSample) -> list[dict[str, Any]]:
    message = sample.message
    blocks: list[dict[str, Any]] = []
    if message.thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": _MARK})
    if message.content or not (message.thinking or message.tool_calls):
        blocks.append({"type": "text", "text": message.content, "citations": None})
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in message.tool_calls
    ]


def _input(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block as it begins, and the deltas that fill it."""
    match block["type"]:
        case "thinking":
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
            return block | {"thinking": "", "signature": ""}, deltas
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case _:
            text = msgspec.json.encode(block["input"]).decode()
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _ending(sample: AnswerSample) -> dict[str, Any]:
    if sample.finish_reason == "length":
        reason = "max_tokens"
    elif sample.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if sample.stop_sequence is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": sample.stop_sequence}
