"""Defines a dialect: how one protocol's requests are read, and its answers written. Pure.

Guarantees that nothing a request says is lost in silence: a field is honoured, changes nothing here, or is refused by
name in the dialect's own form of an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from lachesis.pipeline.extensions.endpoint.logic.conversation import ModelAnswer, ModelRequest, plain_arguments
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import ToolCall
from lachesis.schemas.values import convert_plain

__all__ = [
    "ANY_OBJECT",
    "Dialect",
    "FieldRules",
    "StreamEvent",
    "forced_by_word",
    "forced_names",
    "json_format",
    "optional",
    "tool_call",
    "typed",
    "typed_texts",
]

T = TypeVar("T")
_MAX_QUOTED = 60
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The JSON schema of a `json_object`."""


class StreamEvent(NamedTuple):
    """One server-sent event. `name` None: it has none. `data` None: the end marker of OpenAI's chat streams."""

    name: str | None
    data: dict[str, Any] | None


class Dialect(Protocol):
    """A protocol, requested by POST at `path`."""

    path: str

    def read(self, body: Mapping[str, Any]) -> ModelRequest:
        """Return the request in a body. Raises `DataError` that names what cannot be served."""
        ...

    def answer(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        """Return the body of a whole answer."""
        ...

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[StreamEvent]:
        """Yield the events of an answer that is streamed."""
        ...

    def error(self, status: int, text: str, code: str | None = None) -> dict[str, Any]:
        """Return the body of an error. `code`: OpenAI's name of it, if it has one."""
        ...

    def error_event(self, status: int, text: str) -> StreamEvent:
        """Return the event that ends a stream with an error."""
        ...


class FieldRules(NamedTuple):
    """What becomes of the fields of a request, or of a part of one.

    `read`: they are honoured. `without_effect`: they change nothing of an answer here. `neutral`: they are not served,
    and these are the values, beside null, with which they request nothing.
    """

    read: frozenset[str]
    without_effect: frozenset[str] = frozenset()
    neutral: Mapping[str, Sequence[Any]] = {}

    def check(self, fields: Mapping[str, Any], where: str = "") -> None:
        """Raise `DataError` that names a field which cannot be served."""
        for name, value in fields.items():
            if name in self.read or name in self.without_effect or value is None:
                continue
            if name not in self.neutral:
                raise DataError(f"{where}{name:.{_MAX_QUOTED}} is not known here; leave it out")
            if value not in self.neutral[name]:
                raise DataError(f"{where}{name} is {value!r:.{_MAX_QUOTED}}, which is not served here; leave it out")


def typed(fields: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """Return a field, `default` if it is missing or null. Raises `DataError` if it is of another type."""
    value = fields.get(name)
    return default if value is None else convert_plain(name, kind, value)


def optional(fields: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a field, None if it is missing or null. Raises `DataError` if it is of another type."""
    value = fields.get(name)
    return None if value is None else convert_plain(name, kind, value)


_TEXT_PART_RULES = FieldRules(frozenset({"type", "text"}), frozenset({"cache_control"}), {"citations": ([],)})
_REFUSAL = FieldRules(frozenset({"type", "refusal", "text"}))
_OUTPUT = FieldRules(frozenset({"type", "text"}), frozenset({"logprobs"}), {"annotations": ([],)})
_PART_RULES = {"refusal": _REFUSAL, "output_text": _OUTPUT}
_FORMAT = FieldRules(frozenset({"type", "schema", "json_schema"}), frozenset({"name", "description", "strict"}))


def typed_texts(value: Any, where: str, kinds: Sequence[str]) -> str:
    """Return a content, which is text or a list of parts of these types. Raises `DataError` for any other."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise DataError(f"{where} is {value!r:.{_MAX_QUOTED}}; it must be text, or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = None if kind not in kinds else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise DataError(f"{where} has a part of type {kind!r:.{_MAX_QUOTED}}; the model reads text alone")
        _PART_RULES.get(str(kind), _TEXT_PART_RULES).check(part, f"{where}: ")
        texts.append(text)
    return "".join(texts)


def json_format(where: str, given: Any, inner: str | None = None) -> dict[str, Any] | None:
    """Return the JSON schema that a format of OpenAI's demands of an answer; None for text.

    `inner`: the field in which it has its schema. Raises `DataError` for any other format.
    """
    given = convert_plain(where, dict[str, Any], given)
    _FORMAT.check(given, f"{where}.")
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return dict(ANY_OBJECT)
        case "json_schema":
            holder = given if inner is None else typed(given, inner, dict[str, Any], {})
            place = where if inner is None else f"{where}.{inner}"
            _FORMAT.check(holder, f"{place}.")
            if not isinstance(schema := holder.get("schema"), dict):
                raise DataError(f"{place}.schema is {schema!r:.{_MAX_QUOTED}}; it must be a JSON schema, an object")
            return schema
        case kind:
            raise DataError(f"{where}.type is {kind!r:.{_MAX_QUOTED}}; text, json_object and json_schema are served")


def forced_names(tools: Sequence[dict[str, Any]], name: str | None = None) -> list[str]:
    """Return the names of the tools of which one must be called: of `name` alone, or of any.

    Raises `DataError` if there are none.
    """
    if not tools:
        raise DataError("tool_choice demands a call, and there are no tools")
    return [name] if name is not None else [tool["function"]["name"] for tool in tools]


def forced_by_word(choice: Any, tools: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tools of which one must be called, by a `tool_choice` of OpenAI's that names none.

    Raises `DataError` for a choice that is not served.
    """
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        return forced_names(tools)
    raise DataError(f"tool_choice is {choice!r:.60}; none, auto, required and the name of a function are served")


def tool_call(name: Any, arguments: Any, call_id: Any, where: str) -> ToolCall:
    """Return a tool call of a history. Raises `DataError` if it has no name or id."""
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise DataError(f"{where} has a tool call without name or id")
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return ToolCall(name=name, arguments=plain_arguments(text), id=call_id)
