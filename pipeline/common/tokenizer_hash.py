"""Names what turned messages into token ids: a tokenizer, and parameters of its chat template.

A hash is 64 hex digits of the tokenizer (`pipeline.model.tokenizer`) and, where an environment gives its template
parameters, `+` and 16 digits of these. The first part alone decides what the token ids mean, so a trainer and a teacher
compare only that part. Older groups without parameters are still read.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from lachesis.schemas.control import TokenProbe

__all__ = ["plain_text", "probe_of", "same_tokens", "with_template_parameters"]

_SEPARATOR = "+"
_DIGITS = 16
_PROBE_IDS = 256
_CANDIDATES = 4096
"""Token ids, spread over the vocabulary, among which those of a probe are looked for."""


def with_template_parameters(tokenizer_hash: str, parameters: Mapping[str, Any]) -> str:
    """Return the hash of a tokenizer with these parameters of its template."""
    if not parameters:
        return tokenizer_hash
    content = msgspec.json.encode(dict(parameters), order="deterministic")
    return f"{tokenizer_hash}{_SEPARATOR}{hashlib.sha256(content).hexdigest()[:_DIGITS]}"


def same_tokens(one: str, other: str) -> bool:
    """Return whether two hashes are of one tokenizer, whatever parameters its template had."""
    return one.partition(_SEPARATOR)[0] == other.partition(_SEPARATOR)[0]


def probe_of(tokenizer: Any, vocabulary: int | None) -> TokenProbe | None:
    """Return ids by whose text a server is known to have this tokenizer; None: there are none.

    `vocabulary`: the number of ids that the model knows.

    Only ids of letters and digits are taken, since servers differ in how they show spaces, special tokens and parts of
    characters.
    """
    if tokenizer is None:
        return None
    decode, known = tokenizer.decode, len(tokenizer)
    tokens = known if vocabulary is None else min(known, vocabulary)
    step = max(1, tokens // _CANDIDATES)
    plain = [
        token for token in range(0, tokens, step) if (text := decode([token]).strip()).isascii() and text.isalnum()
    ]
    ids = plain[:: -(-len(plain) // _PROBE_IDS) or 1]
    return TokenProbe(ids=ids, text=plain_text(decode(ids))) if ids else None


def plain_text(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())
