"""Makes token ids of messages and texts by a tokenizer and its chat template, and texts of ids.

A server answers by it, and so does a client that holds the tokenizer of its server itself: the ids are the same.
Guarantees that no text is read that the context could not hold, and that a long text holds up no event loop. No torch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread

from lachesis.pipeline.errors import PromptTooLongError
from lachesis.pipeline.inference.protocol import TokenizeRequest
from lachesis.pipeline.inference.serving.dialects import template_messages
from lachesis.pipeline.model.chat_template import render_chat
from lachesis.schemas.errors import DataError
from lachesis.schemas.values import text_length

__all__ = ["Encode", "TextTokenizer"]

Encode = Callable[[TokenizeRequest], Awaitable[list[int]]]
"""`TextTokenizer.tokens`."""

_READERS = 2
"""Long texts read at once, so that what that takes in memory is bounded."""
_SHORT_CHARS = 4096
"""Characters of a text that is read where it is requested: that takes about as long as to hand it to a thread."""


class TextTokenizer:
    """`tokenizer`: of transformers. `max_model_len`: tokens of the model's context."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._longest = max_model_len * max(map(len, tokenizer.get_vocab()))
        self._reading = anyio.CapacityLimiter(_READERS)

    async def tokens(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a text or of messages. Raises `DataError` where no context could hold it."""
        length = text_length([request.messages or request.prompt, request.tools, request.chat_template_kwargs])
        if length > self._longest:
            raise PromptTooLongError(
                f"the text has {length} characters; a context of {self._max_model_len} tokens holds {self._longest} "
                "at most."
            )
        if length <= _SHORT_CHARS:
            return self._encode(request)
        return await anyio.to_thread.run_sync(self._encode, request, limiter=self._reading)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        found: str = self._tokenizer.decode(token_ids)
        return found

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if request.messages is not None:
            return _chat_tokens(self._tokenizer, request)
        special = request.add_special_tokens is not False
        tokens: list[int] = self._tokenizer.encode(request.prompt, add_special_tokens=special)
        return tokens


def _chat_tokens(tokenizer: Any, request: TokenizeRequest) -> list[int]:
    """Return the token ids of messages.

    Some templates want the arguments of tool calls as text, most as objects.
    """
    messages = template_messages(request.messages or [])
    try:
        return _rendered(tokenizer, request, messages)
    except DataError:
        if any(message.get("tool_calls") for message in messages):
            with suppress(DataError):
                return _rendered(tokenizer, request, template_messages(messages, as_text=True))
        raise


def _rendered(tokenizer: Any, request: TokenizeRequest, messages: list[dict[str, Any]]) -> list[int]:
    return render_chat(
        tokenizer,
        messages,
        tools=request.tools,
        parameters=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        add_special_tokens=bool(request.add_special_tokens),
    )
