"""A scripted answer to a request that forces a form fits that form, or is refused by name."""

from typing import Any

import jsonschema
import msgspec
import pytest

from lachesis.pipeline.environment.matching_answer import matching_answer
from lachesis.pipeline.inference.protocol import StructuredOutputs
from lachesis.schemas.errors import DataError

SCHEMAS: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "minLength": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"properties": {"way": {"enum": ["up", "down"]}, "kind": {"const": 3}, "on": {"type": "boolean"}}},
    {"type": "integer", "minimum": 7, "maximum": 9, "multipleOf": 4},
    {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3},
    {"type": "number", "exclusiveMinimum": 0.25, "exclusiveMaximum": 0.5},
    {"type": "number", "maximum": -3},
    {"type": ["null", "string"], "maxLength": 2},
    {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 5},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"type": "boolean"}},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 0},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "string", "pattern": "^x+$"}, {"type": "integer"}]},
    {"oneOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}], "required": ["b"]},
    {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
    {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"},
    {
        "$defs": {"Sum": {"properties": {"value": {"type": "integer", "minimum": 5}}, "required": ["value"]}},
        "properties": {"sum": {"allOf": [{"$ref": "#/$defs/Sum"}], "description": "the sum"}},
        "required": ["sum"],
    },
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_an_answer_fits_its_schema(schema: dict[str, Any]) -> None:
    answer = matching_answer(StructuredOutputs(json=schema), 0)
    jsonschema.Draft202012Validator(schema).validate(msgspec.json.decode(answer))


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "string", "pattern": "^x+$"}, "pattern"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "bounds"),
        ({"type": "array", "minItems": 2, "uniqueItems": True}, "list of 2 items"),
        ({"$ref": "#/$defs/missing"}, "#/\\$defs/missing"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no end"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "nothing fits"),
    ],
    ids=str,
)
def test_a_schema_that_is_not_followed_is_refused_by_name(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(DataError, match=word):
        matching_answer(StructuredOutputs(json=schema), 0)


def test_each_of_several_forms_has_its_turn() -> None:
    calls = [
        {"type": "tag", "begin": f"<{name}>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</>"}
        for name in ("one", "two")
    ]
    thought = [{"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}]
    blank = [{"type": "regex", "pattern": "\\n{0,2}"}]
    form = {"type": "sequence", "elements": [*thought, *blank, {"type": "or", "elements": calls}]}
    tag = msgspec.json.encode({"type": "structural_tag", "format": form}).decode()
    answers = [matching_answer(StructuredOutputs(structural_tag=tag), number) for number in range(3)]
    assert answers == ["</think><one>null</>", "</think><two>null</>", "</think><one>null</>"]
