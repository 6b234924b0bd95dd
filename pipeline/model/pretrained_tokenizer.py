"""Loads the tokenizer of a pretrained model. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from lachesis.pipeline.model.chat_template import read_template, template_variables
from lachesis.pipeline.model.source import ModelSource, cannot_load, find_model, holds_tokenizer_alone
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["find_named", "load_tokenizer", "tokenizer_from"]

if "TRANSFORMERS_VERBOSITY" not in os.environ:
    transformers_logging.set_verbosity_error()  # what its warnings are about is checked here, and said in our words


def load_tokenizer(path_or_hf_id: str | Path, chat_template: str | None = None) -> Any:
    """Load a tokenizer alone, of a model or from a folder without one.

    `chat_template`: a file or a text in place of the template beside it. Raises ConfigError as `load_model` does.
    """
    name = str(path_or_hf_id)
    if holds_tokenizer_alone(name):
        return tokenizer_from(ModelSource(name, local_files_only=True), chat_template)
    return tokenizer_from(find_named(name, weights=False, template=chat_template is None), chat_template)


def find_named(
    name: str,
    *,
    weights: bool = True,
    tokenizer: bool = True,
    template: bool = True,
    exceptions: Sequence[str] = (),
) -> ModelSource:
    """Return where a model lies; see `find_model`. Raises `ConfigError` that names it."""
    try:
        return find_model(name, weights=weights, tokenizer=tokenizer, template=template, exceptions=exceptions)
    except ConfigError as error:
        raise ConfigError(f"model {name!r} could not be loaded: {error}") from error


def tokenizer_from(source: ModelSource, chat_template: str | None = None) -> Any:
    """Load the tokenizer that lies there, with `chat_template` in place of its own. Raises `ConfigError`."""
    name, template = source.name, read_template(chat_template)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=False, local_files_only=source.local_files_only
        )
    except Exception as error:  # transformers raises whatever its parsing of a damaged folder runs into
        raise cannot_load(name, error) from error
    if template is not None:
        tokenizer.chat_template = template
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer of model {name!r} is a {type(tokenizer).__name__}, which is slow: written in Python, "
            "without the rules of the library `tokenizers`, which decide what a rollout's token ids mean. Name "
            "the folder of a fast tokenizer of this model with `tokenizer`: a folder with tokenizer.json"
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            f"the tokenizer of model {name!r} lacks a chat template; choose an instruct model, or give one with "
            "`chat_template`."
        )
    _check_syntax(name, tokenizer.chat_template)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of model {name!r} lacks an end-of-sequence token; choose an instruct model.")
    return tokenizer


def _check_syntax(name: str, template: str | Mapping[str, str]) -> None:
    """Raise ConfigError when a template, or one of several by name, cannot be read."""
    for text in [template] if isinstance(template, str) else template.values():
        try:
            template_variables(text)
        except DataError as error:
            raise ConfigError(
                f"model {name!r}: {error}; correct it, or name another one with `chat_template`."
            ) from error
