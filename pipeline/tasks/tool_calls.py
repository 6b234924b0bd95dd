"""Reads tool calls in a model's text: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The marker may also contain `<function=NAME><parameter=KEY>VALUE</parameter></function>`, as in Qwen3-Coder's and
Qwen3.5's templates, `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`, as in GLM's, OpenAI's object around a
function, and `parameters` instead of `arguments`, as in Llama's. Mistral's and Llama's own markers are read as well
(`marked_calls`), unless the text has this one. Guarantees that a call inside a thought, however the template marks
thoughts (`thoughts`), or in a block of code between other text, is not read as a call; such calls are counted.
Arguments are an object, or the text of one, as OpenAI's routes write it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from lachesis.pipeline.tasks.marked_calls import with_own_markers
from lachesis.pipeline.tasks.thoughts import thought_spans
from lachesis.schemas.rollout import ToolCall

__all__ = ["CALL_MARKER", "ParsedCalls", "parse_tool_calls", "text_without_calls"]

CALL_MARKER = "<tool_call>"
_CLOSER = "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^`\n]*$", re.MULTILINE)
_MAX_CALLS = 16
_MAX_READ = 4 * _MAX_CALLS
"""Maximum number of calls of one text that are searched for markers of thoughts in their arguments."""


_FUNCTION = re.compile(r"<function=(?P<name>[^<>\n]+)>(?P<body>.*?)(?:</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>(?P<value>.*?)</parameter>\s*", re.DOTALL)
_ARGUMENTS = re.compile(r"(?P<name>[^\W\d][\w.-]*)\s*(?P<body>(?:<arg_key>.*)?)", re.DOTALL)
_ARGUMENT = re.compile(r"\s*<arg_key>(?P<key>[^<>\n]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*", re.DOTALL)


_NONE = msgspec.Raw(b"null")


class _Call(msgspec.Struct):
    """A call, or OpenAI's object around one."""

    name: str = ""
    arguments: msgspec.Raw = _NONE
    parameters: msgspec.Raw = _NONE
    function: "_Call | None" = None


_decoder = msgspec.json.Decoder(_Call)
_text_decoder = msgspec.json.Decoder(str)
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ParsedCalls(NamedTuple):
    """The calls of one turn, what was wrong with those that cannot be read, and how many were only thought or shown."""

    calls: list[ToolCall]
    errors: list[str]
    thought: int = 0


def parse_tool_calls(text: str, *, whole: str = "", opened: bool = False) -> ParsedCalls:
    """Return the tool calls in `text`. Never raises; the text comes from a model.

    `whole`: the same text with special tokens, which may mark thoughts. `opened`: the prompt ends in an open thought,
    so the answer begins in it.
    """
    if CALL_MARKER not in text and CALL_MARKER not in whole:
        text, whole = with_own_markers(text), with_own_markers(whole)
        text = text if CALL_MARKER in text else whole
    if CALL_MARKER not in text:
        return ParsedCalls([], [])
    if CALL_MARKER in whole and thought_spans(whole) and not thought_spans(text):
        text = whole
    calls: list[ToolCall] = []
    errors: list[str] = []
    thoughts = thought_spans(text, _readable(text), opened=opened)
    shown = _shown(text, thoughts)
    skipped = sorted([*thoughts, *shown])
    for match in (match for part in _said(text, skipped) for match in _CALL.finditer(part)):
        if len(calls) + len(errors) == _MAX_CALLS:
            errors.append(f"more than {_MAX_CALLS} tool calls in one turn; the others were not run")
            break
        try:
            calls.append(_read(match[1].strip()))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            errors.append(f"this tool call is not valid: {error}")
    if shown and not calls and not errors:
        errors.append("a tool call in a block of code is an example, and is not run: write it without the block")
    return ParsedCalls(calls, errors, sum(text.count(CALL_MARKER, start, end) for start, end in skipped))


def text_without_calls(text: str, *, opened: bool = False) -> str:
    """Return a model's text without its tool calls. Thoughts, and calls that are only shown, stay."""
    left, place = [], 0
    text = text if CALL_MARKER in text else with_own_markers(text)
    thoughts = thought_spans(text, _readable(text), opened=opened)
    for start, end in sorted([*thoughts, *_shown(text, thoughts)]):
        left += [_CALL.sub("", text[place:start]), text[start:end]]
        place = end
    return "".join([*left, _CALL.sub("", text[place:])]).strip()


def _shown(text: str, thoughts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the blocks of code, outside of thoughts, that show a call.

    A block that is the whole answer is no example. A fence in the text of a call, which has no line ends, opens no
    block.
    """
    blocks: list[tuple[int, int]] = []
    beside: list[str] = []
    place = 0
    for start, end in [*thoughts, (len(text), len(text))]:
        blocks += [(place + first, place + last) for first, last in _blocks(text[place:start], beside)]
        place = end
    if not "".join(beside).strip():
        return []
    return [(start, end) for start, end in blocks if CALL_MARKER in text[start:end]]


def _blocks(part: str, beside: list[str]) -> list[tuple[int, int]]:
    """Return the blocks of code, and the calls between backticks, in a part of a text; `beside` gets the rest."""
    blocks: list[tuple[int, int]] = []
    place = 0
    while (opening := _FENCE.search(part, place)) is not None:
        blocks += _quoted(part, place, opening.start(), beside)
        closing = re.compile(rf"^[ \t]*{opening[1]}[ \t]*$", re.MULTILINE).search(part, opening.end())
        place = len(part) if closing is None else closing.end()
        blocks.append((opening.start(), place))
    return blocks + _quoted(part, place, len(part), beside)


def _quoted(text: str, place: int, end: int, beside: list[str]) -> list[tuple[int, int]]:
    """Return the calls between backticks in a part of a text; `beside` gets the rest."""
    found = []
    while (start := text.find("`" + CALL_MARKER, place, end)) >= 0:
        closer = text.find(_CLOSER, start, end)
        if closer < 0:
            break
        after = closer + len(_CLOSER)
        if text[after : after + 1] == "`":
            beside.append(text[place:start])
            after += 1
            found.append((start, after))
        else:
            beside.append(text[place:after])
        place = after
    beside.append(text[place:end])
    return found


def _said(text: str, skipped: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the parts of an answer that are neither thought nor shown."""
    place = 0
    for start, end in skipped:
        yield text[place:start]
        place = end
    yield text[place:]


def _readable(text: str) -> list[tuple[int, int]]:
    """Return the places of readable calls: a marker of thoughts in their arguments is content."""
    found: list[tuple[int, int]] = []
    place = 0
    for _ in range(_MAX_READ):
        start = text.find(CALL_MARKER, place)
        end = text.find(_CLOSER, start)
        if start < 0 or end < 0:
            break
        place = start + len(CALL_MARKER)
        try:
            _read(text[place:end].strip())
        except (msgspec.MsgspecError, RecursionError, ValueError):
            continue
        place = end + len(_CLOSER)
        found.append((start, place))
    return found


def _read(text: str) -> ToolCall:
    """Return the call in JSON. Raises `MsgspecError` or `ValueError`."""
    written = _FUNCTION.fullmatch(text)
    if written is not None:
        return ToolCall(name=written["name"].strip(), arguments=_parameters(written["body"], _PARAMETER))
    marked = _ARGUMENTS.fullmatch(text)
    if marked is not None:
        return ToolCall(name=marked["name"], arguments=_parameters(marked["body"], _ARGUMENT))
    call = _decoder.decode(text)
    call = call.function or call
    if not call.name:
        raise ValueError("it has no `name`")
    arguments = bytes(call.arguments if bytes(call.arguments) != b"null" else call.parameters).decode()
    if arguments == "null":
        arguments = "{}"
    elif arguments.startswith('"'):
        inner = _text_decoder.decode(arguments).strip() or "{}"
        try:
            _object_decoder.decode(inner)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise ValueError(f"its arguments are a text that holds no JSON object: {error}") from error
        arguments = inner
    return ToolCall(name=call.name, arguments=arguments)


def _parameters(body: str, form: re.Pattern[str]) -> str:
    """Return parameters as a JSON object of texts. Raises `ValueError` if there is any other text."""
    found, place = dict[str, str](), 0
    while (parameter := form.match(body, place)) is not None:
        found[parameter["key"].strip()] = parameter["value"].removeprefix("\n").removesuffix("\n")
        place = parameter.end()
    if body[place:].strip():
        raise ValueError(f"its function has something else than parameters: {body[place:].strip()!r:.60}")
    return msgspec.json.encode(found).decode()
