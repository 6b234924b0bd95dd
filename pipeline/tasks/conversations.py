"""Reads prompts as data sets have them: text, chat messages, transcripts, a request's input. Pure.

Guarantees that content the model would not see, such as an image, is refused with a message, and that an answer at the
end of a conversation is separated from the prompt.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lachesis.pipeline.tasks.columns import is_missing
from lachesis.pipeline.tasks.literals import literal_in
from lachesis.pipeline.tasks.transcripts import read_transcript
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.rollout import Message, ToolCall

__all__ = ["Conversation", "read_conversation"]

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_ROLE = ("role", "from")
_CONTENT = ("content", "value", "text", "output")
_INNER = ("input", "messages", "conversations", "conversation")
_PRINTED_CHAT = re.compile(r"\s*\[\{['\"](?:role|from|content|value)['\"]: .*\}\s*\]\s*\Z", re.DOTALL)
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})


class Conversation(msgspec.Struct, frozen=True):
    """A prompt, and the assistant's answer that follows it, if the data set has one."""

    messages: list[Message]
    answer: str | None = None
    is_chat: bool = False
    """Whether it came as messages, not as a text."""


def read_conversation(value: Any) -> Conversation:
    """Return the conversation in a column. Raises `ConfigError`, which says what was found instead."""
    if is_missing(value):
        raise ConfigError("its prompt is missing")
    if isinstance(value, str):
        turns = _listed(value) or read_transcript(value)
        if turns is None and _PRINTED_CHAT.match(value) and literal_in(value) is None:
            raise ConfigError(
                "its prompt looks like chat messages that a data frame printed, and cannot be read: write the table as "
                'Parquet or JSON lines, or, if it is meant as text, give template = "{COLUMN}" with its column'
            )
        if turns is None:
            if not value.strip():
                raise ConfigError("its prompt is empty, neither text nor chat messages")
            return Conversation([Message(role="user", content=value)])
        value = turns
    if isinstance(value, Mapping):
        value = _of_object(value)
    if isinstance(value, str):
        return read_conversation(value)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ConfigError(f"its prompt is neither text nor chat messages: {value!r:.80} ({type(value).__name__})")
    messages = [_message(one) for one in value]
    asked = list(messages)
    while asked and asked[-1].role == "assistant":
        asked.pop()
    if not asked:
        raise ConfigError("its prompt is empty" if not messages else "its prompt has nothing but the assistant's words")
    after = [one.content for one in messages[len(asked) :] if one.content]
    return Conversation(asked, after[-1] if after else None, is_chat=True)


def _listed(text: str) -> list[Any] | None:
    """Return the messages that a cell of a table holds, as JSON or as Python prints them; None for any other text."""
    if not text.lstrip().startswith("[") or not any(
        f"{quote}{name}{quote}" in text for name in _ROLE for quote in "'\""
    ):
        return None
    found = literal_in(text)
    if not isinstance(found, list):
        return None
    is_chat = found and all(isinstance(one, dict) and _first(one, _ROLE) for one in found)
    return found if is_chat else None


def _of_object(value: Mapping[str, Any]) -> Any:
    """Return the messages of one message, or of an object that holds a request's input."""
    if _first(value, _ROLE) is not None:
        return [value]
    inner = next((value[name] for name in _INNER if not is_missing(value.get(name))), None)
    if inner is None:
        raise ConfigError(
            f"its prompt is an object of {', '.join(map(str, value))[:80]}, in which there are no messages"
        )
    instructions = value.get("instructions") or value.get("system")
    if isinstance(instructions, str) and instructions:
        turns = inner if isinstance(inner, list) else [{"role": "user", "content": inner}]
        return [{"role": "system", "content": instructions}, *turns]
    return inner


def _message(value: Any) -> Message:
    if not isinstance(value, Mapping):
        raise ConfigError(f"its prompt is neither text nor chat messages: one of its turns is {value!r:.80}")
    kind = value.get("type")
    role = {"function_call": "assistant", "function_call_output": "tool"}.get(str(kind)) or _first(value, _ROLE)
    if not isinstance(role, str) or not role:
        raise ConfigError(f"its prompt has a turn without role (or from): {dict(value)!r:.80}")
    role = _ROLES.get(role.lower(), role.lower())
    given = _opened_calls(value.get("tool_calls"))
    calls = [_call(one) for one in given]
    if kind == "function_call":
        calls = [_call({"function": value, "id": value.get("call_id")})]
    elif not calls and value.get("function_call"):  # OpenAI's form before there were tools
        calls = [_call(value["function_call"])]
    content = _first(value, _CONTENT)
    if content is None and not calls:
        raise ConfigError(f"its prompt has a turn of {role} without content: {dict(value)!r:.80}")
    name = value.get("name") if role == "tool" or kind is None else None
    call_id = value.get("tool_call_id") or (value.get("call_id") if role == "tool" else None)
    return Message(
        role=role,
        content=_text(content),
        name=name if isinstance(name, str) and kind != "function_call" else None,
        tool_calls=calls,
        tool_call_id=call_id if isinstance(call_id, str) else None,
    )


def _opened_calls(value: Any) -> list[Any]:
    """Return the tool calls of a turn, which a table may hold as JSON."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value or "[]")
        except msgspec.DecodeError as error:
            raise ConfigError(f"its prompt has tool calls that are no JSON: {value!r:.80}") from error
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"its prompt has tool calls that are no list: {value!r:.80}")
    return value or []


def _text(content: Any) -> str:
    """Return the text of a content, which may have several parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        raise ConfigError(f"its prompt is neither text nor chat messages: a turn's content is {content!r:.80}")
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ConfigError(
                f"its prompt has a part of type {kind!r:.40}, which would be lost: an environment of kind dataset asks "
                "in text alone. Write an environment of your own for images"
            )
        parts.append(text)
    return "".join(parts)


def _call(value: Any) -> ToolCall:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise ConfigError(f"its prompt has a tool call without a name: {value!r:.80}")
    arguments = inner.get("arguments", {})
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    name = value.get("id")
    return ToolCall(name=inner["name"], arguments=text, id=name if isinstance(name, str) else None)


def _first(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((value[name] for name in names if value.get(name) is not None), None)
