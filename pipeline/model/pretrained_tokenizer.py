"""Loads the tokenizer of a pretrained model. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from lachesis.pipeline.model.source import ModelSource, find_model, holds_tokenizer_alone
from lachesis.schemas.errors import ConfigError

__all__ = ["cannot_load", "find_named", "load_tokenizer", "tokenizer_from"]


def load_tokenizer(path_or_hf_id: str | Path) -> Any:
    """Load a tokenizer alone, of a model or from a folder without one.

    Raises ConfigError as `load_model` does.
    """
    if holds_tokenizer_alone(str(path_or_hf_id)):
        return tokenizer_from(ModelSource(str(path_or_hf_id), local_files_only=True))
    return tokenizer_from(find_named(str(path_or_hf_id), weights=False))


def find_named(
    name: str, *, weights: bool = True, tokenizer: bool = True, exceptions: Sequence[str] = ()
) -> ModelSource:
    """Return where a model lies; see `find_model`. Raises `ConfigError` that names it."""
    try:
        return find_model(name, weights=weights, tokenizer=tokenizer, exceptions=exceptions)
    except ConfigError as error:
        raise ConfigError(f"model {name!r} could not be loaded: {error}") from error


def tokenizer_from(source: ModelSource) -> Any:
    """Load the tokenizer that lies there. Raises `ConfigError`."""
    name = source.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=source.local_files_only
        )
    except Exception as error:  # transformers raises whatever its parsing of a damaged folder runs into
        raise cannot_load(name, error) from error
    missing = [
        what
        for what, present in (
            ("a fast tokenizer", tokenizer.is_fast),
            ("a chat template", bool(tokenizer.chat_template)),
            ("an end-of-sequence token", tokenizer.eos_token_id is not None),
        )
        if not present
    ]
    if missing:
        raise ConfigError(f"the tokenizer of model {name!r} lacks {', '.join(missing)}; choose an instruct model.")
    return tokenizer


def cannot_load(name: str, error: Exception) -> ConfigError:
    """Return the error to raise where a model cannot be loaded."""
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return ConfigError(
        f"model {name!r} could not be loaded: {reason}. Give a folder written by save_pretrained, or the id of a "
        "causal language model on the Hugging Face hub."
    )
