"""Texts of token ids, by the tokenizer of the run's model; nothing is loaded from the network.

Guarantees that no text is shown that another tokenizer made: a group names its tokenizer by a hash.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio

from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.tokenizer_hash import same_tokens
from lachesis.pipeline.config.run import RunConfig

__all__ = ["TokenTexts", "piecewise_texts"]

_MAX_PENDING = 8
"""Tokens of one character at most: beyond, what is there is shown with replacement characters."""
Decode = Callable[[Sequence[int]], str]


def piecewise_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds; a character of several tokens is added by its last one. Pure."""
    texts: list[str] = []
    start = 0
    for end in range(1, len(ids) + 1):
        context = ids[max(0, start - 1) : start]
        before = decode(context)
        text = decode([*context, *ids[start:end]])[len(before) :]
        if text.endswith("\ufffd") and end - start < _MAX_PENDING and end < len(ids):
            texts.append("")
            continue
        texts.append(text)
        start = end
    return texts


class _LoadedTokenizer(NamedTuple):
    hash: str
    decode: Decode


class TokenTexts:
    """The tokenizer of the run's model, loaded when the first group is shown."""

    def __init__(self, config: RunConfig) -> None:
        self._model = config.tokenizer_name
        self._template = config.chat_template
        self._loaded: _LoadedTokenizer | str | None = None
        self._lock = anyio.Lock()

    async def texts(self, tokenizer_hash: str, sequences: Sequence[Sequence[int]]) -> list[list[str]] | str:
        """Return the text of each token of each sequence, or why there is none."""
        async with self._lock:
            if self._loaded is None:
                self._loaded = await anyio.to_thread.run_sync(_load, self._model, self._template)
        loaded = self._loaded
        if isinstance(loaded, str):
            return loaded
        if not same_tokens(loaded.hash, tokenizer_hash):
            return f"the tokenizer of {self._model} is not the one that this group was made with"
        decode = loaded.decode
        return await anyio.to_thread.run_sync(lambda: [piecewise_texts(ids, decode) for ids in sequences])


def _load(model: str | None, chat_template: str | None) -> _LoadedTokenizer | str:
    """Load the tokenizer of a model, or return why there is none."""
    if model is None:
        return "the configuration names no model, and so no tokenizer"
    try:
        from transformers import AutoTokenizer

        from lachesis.pipeline.model.chat_template import read_template
        from lachesis.pipeline.model.tokenizer import tokenizer_hash
    except ModuleNotFoundError as error:
        return f"tokenizers need {error.name}: {install_command('train')}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
        tokenizer.chat_template = read_template(chat_template) or tokenizer.chat_template
        backend = tokenizer.backend_tokenizer
        return _LoadedTokenizer(tokenizer_hash(tokenizer), partial(backend.decode, skip_special_tokens=False))
    except (OSError, ValueError, AttributeError) as error:
        where = "" if Path(model).is_dir() else ", nor is it in the cache of the Hugging Face hub"
        return f"there is no tokenizer in {model}{where}: {str(error).splitlines()[0][:200]}"
