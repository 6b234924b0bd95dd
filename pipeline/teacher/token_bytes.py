"""Reads the bytes that each token stands for from the tokenizer's own description.

Three kinds are known: byte-level vocabularies (GPT-2, Llama 3, Qwen, DeepSeek), sentencepiece's (a sign for the space,
and `<0x0A>` for a byte), and plain text. A tokenizer of another kind, for example WordPiece, is refused: the bytes of
its tokens depend on their neighbours.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lachesis.pipeline.teacher.logic.alignment import byte_table
from lachesis.schemas.errors import ConfigError

__all__ = ["token_bytes"]

_SPACE = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, name: str) -> dict[int, bytes]:
    """Return the bytes of each token by id; of special tokens and other added ones, their text.

    `tokenizer`: a `PreTrainedTokenizerFast`. Raises `ConfigError`, with its `name`, where its kind is not known.
    """
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {entry["id"]: entry["content"] for entry in description.get("added_tokens", [])}
    kinds = set(_kinds(description.get("decoder")))
    vocabulary: Mapping[str, int] = tokenizer.get_vocab()
    if "ByteLevel" in kinds:
        table = byte_table()
        found = {i: bytes(table[c] for c in token) for token, i in vocabulary.items() if set(token) <= table.keys()}
    elif kinds & {"Metaspace", "ByteFallback"}:
        found = {i: _of_sentencepiece(token) for token, i in vocabulary.items()}
    elif kinds <= {"Fuse"}:
        found = {i: token.encode() for token, i in vocabulary.items()}
    else:
        raise ConfigError(
            f"tokenizer {name}: its tokens cannot be distinguished by bytes (decoder {', '.join(sorted(kinds))}); with "
            'teacher.tokenizers = "align" both must be byte-level, sentencepiece or plain text'
        )
    return found | {i: content.encode() for i, content in added.items()}


def _of_sentencepiece(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _kinds(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _kinds(inner)
    else:
        yield decoder["type"]
