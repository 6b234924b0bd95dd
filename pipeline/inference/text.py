"""Texts of samples in the making: where a stop string ends one, and what of a growing text is certain.

In: a sample's token ids, as they come. Out: text. Guarantees that the pieces of a stream together are the text that an
answer in one piece has: no half of a character is shown, and no beginning of a stop string. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Decode", "GrowingText", "StopStrings", "first_stop", "text_of"]

Decode = Callable[[list[int]], str]
"""Text of token ids, without special tokens."""

_SPARE_TOKENS = 4
"""Tokens before the longest stop string that are decoded with it: a tokenizer may treat the first one differently."""
_UNFINISHED = "�"
"""What a tokenizer shows of bytes that are no whole character yet."""


class StopStrings:
    """Texts that end a sample. A token is at least one byte of one, so few tokens have to be decoded to see it."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self.stops = tuple(stops)
        self._decode = decode
        self._tokens = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS

    def find(self, tokens: Sequence[int]) -> str | None:
        """Return the stop string that the last of `tokens` completes, None if none does."""
        found = first_stop(self._decode(list(tokens[-self._tokens :])), self.stops)
        return found[1] if found is not None else None


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first stop string in `text` begins, and which it is: the longest that begins there."""
    places = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not places:
        return None
    start, _, stop = min(places)
    return start, stop


def text_of(tokens: Sequence[int], stop_reason: int | str | None, decode: Decode) -> str:
    """Return the text of a sample that has ended, without what ended it."""
    if isinstance(stop_reason, int):
        tokens = tokens[:-1]
    text = decode(list(tokens))
    if isinstance(stop_reason, str) and stop_reason in text:
        text = text[: text.index(stop_reason)]
    return text


class GrowingText:
    """The text of one sample, handed out piece by piece while it is sampled. A stop token is no part of it."""

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = stops
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._read = 0  # the text so far has tokens[:read]; those from start on are decoded with the next
        self._text = ""
        self._end = 0

    @property
    def shown(self) -> str:
        """The text that was handed out so far."""
        return self._text[: self._end]

    def append(self, token: int) -> str:
        """Return the text that `token` makes certain; perhaps none."""
        self._tokens.append(token)
        piece = self._next_text()
        if piece and not piece.endswith(_UNFINISHED):
            self._text += piece
            self._start, self._read = self._read, len(self._tokens)
        stop = first_stop(self._text[self._end :], self._stops)
        return self._show(len(self._text) - self._held if stop is None else self._end + stop[0])

    def finish(self, stop_reason: int | str | None) -> str:
        """Return what is left once the sample has ended."""
        self._text += self._next_text()
        self._read = len(self._tokens)
        end = self._text.find(stop_reason) if isinstance(stop_reason, str) else -1
        return self._show(end if end >= 0 else len(self._text))

    def _next_text(self) -> str:
        """Return the text of the tokens that are not read yet: together with a few before, for the spaces between."""
        before = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _show(self, end: int) -> str:
        start, self._end = self._end, max(self._end, end)
        return self._text[start : self._end]
