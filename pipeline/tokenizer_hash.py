"""Names what turned messages into token ids: a tokenizer, and parameters of its chat template.

A hash is 64 hex digits of the tokenizer (`pipeline.model.tokenizer`) and, where an environment gives its template
parameters, `+` and 16 digits of these. The first part alone decides what the token ids mean, so a trainer and a teacher
go by it; groups of before, without parameters, are read as ever.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["same_tokens", "with_template_parameters"]

_SEPARATOR = "+"
_DIGITS = 16


def with_template_parameters(tokenizer_hash: str, parameters: Mapping[str, Any]) -> str:
    """Return the hash of a tokenizer with these parameters of its template."""
    if not parameters:
        return tokenizer_hash
    content = msgspec.json.encode(dict(parameters), order="deterministic")
    return f"{tokenizer_hash}{_SEPARATOR}{hashlib.sha256(content).hexdigest()[:_DIGITS]}"


def same_tokens(one: str, other: str) -> bool:
    """Return whether two hashes are of one tokenizer, whatever parameters its template had."""
    return one.partition(_SEPARATOR)[0] == other.partition(_SEPARATOR)[0]
