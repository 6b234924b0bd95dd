"""Makes a text that matches structured outputs: a scripted answer where its form is forced. Pure.

Guarantees that what it returns fits the schema. A schema with a keyword that it does not follow is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from lachesis.pipeline.inference.protocol import StructuredOutputs
from lachesis.schemas.errors import DataError

__all__ = ["matching_answer"]

_MAX_DEPTH = 12
_OPTIONAL_DEPTH = 4
"""Below it an object has only the properties that it must have, so that a schema which names itself comes to an end."""
_MAX_ITEMS = 1000
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@example.org",
    "hostname": "example.org",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_NOT_FOLLOWED = (
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "maxProperties",
    "minProperties",
    "not",
    "pattern",
    "patternProperties",
    "propertyNames",
)
_WORDS_OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords by which a schema without `type` says of which it is."""


def matching_answer(wanted: StructuredOutputs, number: int) -> str:
    """Return a text that matches; where several forms are allowed, that of the answer's `number`, in turn.

    Raises `DataError` if there is none, or a part of `wanted` is not followed.
    """
    if wanted.json is not None:
        return _example(wanted.json)
    tag = msgspec.json.decode(wanted.structural_tag or "{}")
    return _of_format(tag.get("format"), number)


def _of_format(form: Any, number: int) -> str:
    """Return a text of one format of a structural tag."""
    match form:
        case {"type": "json_schema", "json_schema": schema}:
            return _example(schema)
        case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
            return f"{begin}{_of_format(content, number)}{end}"
        case {"type": "sequence", "elements": list(elements)}:
            return "".join(_of_format(element, number) for element in elements)
        case {"type": "or", "elements": [_, *_] as elements}:
            return _of_format(elements[number % len(elements)], number)
        case {"type": "any_text"} | {"type": "regex", "pattern": "\\n{0,2}"}:
            return ""
    raise DataError(f"structured_outputs: scripted answers do not follow the format {form!r:.120}")


def _example(schema: Any) -> str:
    return msgspec.json.encode(_Examples(schema).of(schema, 0)).decode()


class _Examples:
    """Values that fit parts of one schema; `root` is the whole, to which references lead."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, schema: Any, depth: int) -> Any:
        """Return a value that fits. Raises `DataError` if none is found."""
        if schema is True:
            return None
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            why = "nothing fits" if depth <= _MAX_DEPTH else f"more than {_MAX_DEPTH} levels, or no end, has"
            raise DataError(f"structured_outputs: {why} the schema {schema!r:.120}")
        if unknown := [word for word in _NOT_FOLLOWED if word in schema]:
            raise DataError(f"structured_outputs: scripted answers do not follow {', '.join(unknown)} in a schema")
        fixed = [schema["const"]] if "const" in schema else schema.get("enum", [])
        if fixed:
            return fixed[0]
        if parts := [*schema.get("allOf", []), *([{"$ref": schema["$ref"]}] if "$ref" in schema else [])]:
            whole = _without(schema, "allOf", "$ref")
            for part in parts:
                refers = isinstance(part, Mapping) and "$ref" in part
                rest = _merged(_without(part, "$ref"), self._referred(part["$ref"])) if refers else part
                whole = _merged(whole, rest)
            return self.of(whole, depth + 1)
        for word in ("anyOf", "oneOf"):
            if word in schema:
                return self._of_any([_merged(_without(schema, word), one) for one in schema[word]], depth)
        return self._of_type(_type_of(schema), schema, depth)

    def _of_any(self, schemas: list[Any], depth: int) -> Any:
        reasons = []
        for schema in schemas:
            try:
                return self.of(schema, depth + 1)
            except DataError as error:
                reasons.append(str(error))
        raise DataError(reasons[0] if reasons else "structured_outputs: a choice of no schemas")

    def _of_type(self, kind: str | None, schema: Mapping[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return _string(schema)
            case "integer" | "number":
                return _number(schema, whole=kind == "integer")
            case "boolean":
                return True
            case "null" | None:
                return None
        raise DataError(f"structured_outputs: no JSON type is called {kind!r:.60}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", [])
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        names = [*known, *(name for name in required if name not in known)]
        return {
            name: self.of(known.get(name, rest), depth + 1)
            for name in names
            if name in required or depth < _OPTIONAL_DEPTH
        }

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        fewest = schema.get("minItems", 0)
        most = schema.get("maxItems", max(fewest, len(first) + 1))
        count = max(fewest, min(most, len(first) or (1 if depth < _OPTIONAL_DEPTH else 0)))
        if count > _MAX_ITEMS or (schema.get("uniqueItems") and count > 1):
            raise DataError(
                f"structured_outputs: scripted answers have no list of {count} items as the schema wants it"
            )
        rest = schema.get("items", True)
        return [self.of(first[place] if place < len(first) else rest, depth + 1) for place in range(count)]

    def _referred(self, place: str) -> Any:
        """Return the part of the schema that a reference names."""
        found = self._root
        for word in place.removeprefix("#").split("/")[1:]:
            found = found.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not place.startswith("#") or found is None:
            raise DataError(f"structured_outputs: the schema has no part {place!r:.120}")
        return found


def _without(schema: Mapping[str, Any], *words: str) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if word not in words}


def _merged(one: Any, other: Any) -> Any:
    """Return a schema that both fit: of a keyword that both have, properties and requirements are put together."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one if other is True else other
    both = {**other, **one}
    for word in ("properties", "$defs"):
        if word in one and word in other:
            both[word] = {**other[word], **one[word]}
    if "required" in one and "required" in other:
        both["required"] = [*other["required"], *one["required"]]
    return both


def _type_of(schema: Mapping[str, Any]) -> str | None:
    kind = schema.get("type")
    if isinstance(kind, list):
        return next((one for one in kind if one != "null"), "null")
    if kind is None:
        return next((name for name, words in _WORDS_OF_TYPE.items() if any(word in schema for word in words)), None)
    return str(kind)


def _string(schema: Mapping[str, Any]) -> str:
    text = _FORMATS.get(schema.get("format", ""), "text")
    fewest, most = schema.get("minLength", 0), schema.get("maxLength", math.inf)
    if "format" in schema and not fewest <= len(text) <= most:
        raise DataError("structured_outputs: scripted answers have no text of that format and length")
    return text.ljust(fewest, "t")[: None if most == math.inf else int(most)]


def _number(schema: Mapping[str, Any], *, whole: bool) -> float:
    step = schema.get("multipleOf", 1 if whole else None)
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    spread = step or (1.0 if math.inf in (high, -low) else (high - low) / 4)
    tried = [1, low, low + spread, high - spread, high, 0]
    if step:
        tried = [math.ceil(value / step) * step for value in tried if math.isfinite(value)]
    for value in tried:
        if math.isfinite(value) and _is_within(value, schema):
            return int(value) if whole else value
    raise DataError("structured_outputs: scripted answers have no number within the bounds of the schema")


def _is_within(value: float, schema: Mapping[str, Any]) -> bool:
    low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    return bool(low <= value <= high and above < value < below)
