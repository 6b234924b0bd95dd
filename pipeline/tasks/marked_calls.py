"""Rewrites tool calls in the forms of Mistral's and Llama's templates into `<tool_call>`. Pure.

Mistral writes `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since 2025 `[TOOL_CALLS]NAME[ARGS]{...}`;
Llama writes `<|python_tag|>{"name": ..., "parameters": {...}}`, several of them between semicolons. Guarantees that a
marker without a call after it stays text: it may be words about the marker, or a program for Llama's interpreter. The
JSON of each call is not changed.
"""

import json
import re

__all__ = ["CALL_TOKENS", "may_be_marked_call", "with_own_markers"]

CALL_TOKENS = ("[TOOL_CALLS]", "<|python_tag|>")
"""The markers. They are special tokens, so a text without special tokens does not show them."""

_MARKER = re.compile("|".join(map(re.escape, CALL_TOKENS)))
_NAMED = re.compile(r"\s*(?P<name>[^\W\d][\w.-]*)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*(?=\{)")
_LISTED = re.compile(r"\s*(?P<open>\[)?\s*(?=\{)")
_BETWEEN = re.compile(r"\s*[,;]?\s*")
_LIKE_OBJECT = re.compile(r"\{\s*[\"}]")
_MAX_MARKERS = 64
_decoder = json.JSONDecoder()


def may_be_marked_call(text: str) -> bool:
    """Return whether a text that does not show special tokens, such as the markers, may hold a call."""
    return _LIKE_OBJECT.search(text) is not None


def with_own_markers(text: str) -> str:
    """Return the text with each such call between `<tool_call>` and `</tool_call>`. Never raises."""
    parts, place = [], 0
    for _ in range(_MAX_MARKERS):
        marker = _MARKER.search(text, place)
        if marker is None:
            break
        calls, end = _calls_after(text, marker.end())
        parts += [text[place : marker.start()], *calls] if calls else [text[place : marker.end()]]
        place = end
    return "".join([*parts, text[place:]])


def _calls_after(text: str, place: int) -> tuple[list[str], int]:
    """Return the calls that begin after a marker, each in `<tool_call>`, and where the last one ends.

    Text that begins like a call and cannot be read is included, so that the reader refuses it with a reason.
    """
    named = _NAMED.match(text, place)
    if named is not None:
        end = _object_end(text, named.end())
        arguments = text[named.end() : end or len(text)]
        return [call_text(named["name"], arguments)], end or len(text)
    listed = _LISTED.match(text, place)
    if listed is None:
        return [], place
    calls: list[str] = []
    place = listed.end()
    while text[place : place + 1] == "{":
        end = _object_end(text, place)
        calls.append(_enclosed(text[place : end or len(text)]))
        if end is None:
            return calls, len(text)
        between = _BETWEEN.match(text, end)
        place = end if between is None else between.end()
    return calls, place + (listed["open"] is not None and text[place : place + 1] == "]")


def call_text(name: str, arguments: str) -> str:
    """Return the text of a call as `tool_calls` reads it; `arguments`: JSON."""
    return _enclosed(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')


def _enclosed(call: str) -> str:
    """Return the JSON of a call between the markers; a closing marker inside its texts is escaped."""
    return f"<tool_call>{call.replace('</tool_call>', '<' + chr(92) + '/tool_call>')}</tool_call>"


def _object_end(text: str, place: int) -> int | None:
    """Return the end of the JSON object that begins at `place`; None if there is none."""
    try:
        return _decoder.raw_decode(text, place)[1]
    except (ValueError, RecursionError):
        return None
