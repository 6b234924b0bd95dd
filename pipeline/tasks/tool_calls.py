"""Reads tool calls in what a model wrote: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import re
from typing import NamedTuple

import msgspec

from lachesis.schemas.rollout import ToolCall

__all__ = ["ParsedCalls", "parse_tool_calls", "text_without_calls"]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MAX_CALLS = 16


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


_decoder = msgspec.json.Decoder(_Call)


class ParsedCalls(NamedTuple):
    """The calls of one turn, and what was wrong with those that cannot be read."""

    calls: list[ToolCall]
    errors: list[str]


def parse_tool_calls(text: str) -> ParsedCalls:
    """Return the tool calls in `text`. Never raises; the text comes from a model."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    for match in _CALL.finditer(text):
        if len(calls) + len(errors) == _MAX_CALLS:
            errors.append(f"more than {_MAX_CALLS} tool calls in one turn; the others were not run")
            break
        try:
            call = _decoder.decode(match[1].strip())
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            errors.append(f"this tool call is not valid: {error}")
        else:
            calls.append(ToolCall(name=call.name, arguments=bytes(call.arguments).decode()))
    return ParsedCalls(calls, errors)


def text_without_calls(text: str) -> str:
    """Return what a model wrote beside its tool calls."""
    return _CALL.sub("", text).strip()
