"""Builds the local character tokenizer, and names any tokenizer by a hash.

From an alphabet it makes a `PreTrainedTokenizerFast` with a chat template of its own. For any Hugging Face tokenizer it
computes `tokenizer_hash`, which every rollout carries. Two tokenizers share a hash exactly when they turn the same
messages into the same token ids: the hash covers vocabulary, rules, special tokens and chat template, and leaves out
padding and truncation, which calls change. Torch is not imported here.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "ALPHABET",
    "CHAT_TEMPLATE",
    "build_character_tokenizer",
    "common_beginning",
    "save_tokenizer",
    "tokenizer_hash",
]

ALPHABET = string.printable[:95] + "\n"
"""Printable ASCII and the newline. Any other character becomes the unknown token."""

PAD, BOS, EOS, SEPARATOR, UNKNOWN = "<|pad|>", "<|bos|>", "<|eos|>", "<|sep|>", "<|unk|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ message['content'] + '" + SEPARATOR + "' }}{% endif %}"
    "{% endfor %}"
)
"""Every message that is not the assistant's ends with the separator, after which the assistant speaks. The separator
is therefore the generation prompt, and `add_generation_prompt` changes nothing."""


def build_character_tokenizer(*, max_length: int, phrases: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character of `ALPHABET` and five special tokens.

    `max_length`: context length of the model in tokens, stored in the tokenizer's configuration.
    `phrases`: strings that get one token each wherever they occur. The fixed wording of a task's questions belongs
    here: a tiny model then reads a few tokens instead of fifty characters that never change.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, SEPARATOR, UNKNOWN, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[SEPARATOR],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def common_beginning(prompts: Iterable[str]) -> str:
    """Return what all `prompts` begin with, the fixed wording of a task's questions.

    A phrase for the tokenizer.
    """
    ordered = sorted(prompts)
    first, last = ordered[0], ordered[-1]  # what these two share, all between them share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return first[:length]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a tokenizer with its chat template into `folder`, as transformers 4 and 5 both read it.

    Version 5 names a class that version 4 does not have, and lists further special tokens where it wants a mapping.
    """
    tokenizer.save_pretrained(folder)
    path = Path(folder) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2) + "\n")


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 (64 hex digits) of everything that decides how messages become token ids."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for transient in ("padding", "truncation", "version"):
        backend.pop(transient, None)
    identity = {
        "backend": backend,
        "chat_template": tokenizer.chat_template,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "pad": tokenizer.pad_token_id,
    }
    canonical = json.dumps(identity, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
