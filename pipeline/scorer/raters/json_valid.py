"""Rates 1 if the answer is JSON with the wanted keys, or of the wanted JSON Schema, else 0."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.scorer.answers.given_and_reference import check_pattern, given
from lachesis.pipeline.scorer.rater import Sample, rater
from lachesis.schemas.errors import ConfigError

__all__ = ["json_valid"]

_FENCED = re.compile(r"(`{3,}|~{3,})[ \t]*(?:json[c5l]?[ \t]*)?\n(.*)\n[ \t]*\1", re.DOTALL | re.IGNORECASE)


def _check(*, pattern: str | None = None, schema: Mapping[str, Any] | None = None, **_: object) -> None:
    check_pattern(pattern=pattern)
    if schema is not None:
        _validator(json.dumps(schema))


@rater(bounds=(0.0, 1.0), version="3", apart=("pattern", "schema"), check=_check)
def json_valid(
    sample: Sample,
    *,
    pattern: str | None = None,
    required: Sequence[str] = (),
    schema: Mapping[str, Any] | None = None,
) -> float:
    """Parse the answer strictly (no NaN or Infinity). It may be one fenced block, and nothing else.

    With `required`, it must be an object that has these keys.

    `schema` is a JSON Schema (2020-12, unless it says otherwise) without references to other documents.
    """
    try:
        answer = given(sample, pattern) or ""
        fenced = _FENCED.fullmatch(answer)
        value = json.loads(answer if fenced is None else fenced[2], parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return 0.0
    if required and not (isinstance(value, dict) and all(key in value for key in required)):
        return 0.0
    return 1.0 if schema is None else float(_validator(json.dumps(schema)).is_valid(value))


@lru_cache(maxsize=32)
def _validator(schema: str) -> Any:
    try:
        from jsonschema import Draft202012Validator, SchemaError, validators
        from jsonschema_specifications import REGISTRY
    except ModuleNotFoundError as error:
        raise StartupError(f"rater json_valid: schema needs jsonschema: {install_command('raters')}") from error
    document = json.loads(schema)
    kind = validators.validator_for(document, default=Draft202012Validator)
    try:
        kind.check_schema(document)
    except SchemaError as error:
        raise ConfigError(f"rater json_valid: schema is no JSON Schema: {error.message}") from error
    return kind(document, registry=REGISTRY)  # its own fetches what a reference names, from anywhere


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond a float's range")
    return number
