"""Finds all tokens that end a sample, in the files beside a model. No torch.

Chat models have several (end of turn, end of text, end of a tool call): `generation_config.json` lists them, and a
tokenizer names only one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lachesis.pipeline.common.small_files import read_small_file
from lachesis.schemas.errors import ConfigError

__all__ = ["end_tokens", "named_end_tokens"]


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the ids by which `generate` and vLLM end a sample of a loaded model, and the tokenizer's own.

    Those of `generation_config.json` or, where it is absent or names none, of the model's configuration. Ids that the
    model cannot sample are left out.
    """
    config = model.config
    found = _ids(getattr(getattr(model, "generation_config", None), "eos_token_id", None))
    found = found or _ids(getattr(config, "eos_token_id", None))
    found = found or _ids(getattr(config.get_text_config(), "eos_token_id", None))
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    return frozenset(one for one in found | _ids(tokenizer.eos_token_id) if vocabulary is None or one < vocabulary)


def named_end_tokens(name: str, tokenizer: Any) -> frozenset[int]:
    """Return the same of a model that is not loaded, by the files in its folder or the hub's cache.

    Raises `ConfigError` when one of them cannot be read.
    """
    found: frozenset[int] = frozenset()
    for file in ("generation_config.json", "config.json"):
        found = found or _ids(_read(name, file).get("eos_token_id"))
    return frozenset(one for one in found | _ids(tokenizer.eos_token_id) if one < len(tokenizer))


def _ids(value: Any) -> frozenset[int]:
    """Return one id, or those of a list; what is none counts as absent."""
    given = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return frozenset(one for one in given if isinstance(one, int) and not isinstance(one, bool) and one >= 0)


def _read(name: str, file: str) -> dict[str, Any]:
    path: Any = Path(name) / file
    if not Path(name).is_dir():
        from transformers.utils import cached_file

        missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        try:
            path = cached_file(name, file, **missing)
        except OSError:
            path = None
    if path is None or not Path(path).is_file():
        return {}
    try:
        found = json.loads(read_small_file(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
