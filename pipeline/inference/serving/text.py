"""Decodes growing samples: finds where a stop string ends one, and which part of the text is certain.

It takes a sample's token ids one by one and returns text. Guarantees that the pieces of a stream add up to the text of
an answer that is not streamed: no half of a character is shown, and no beginning of a stop string. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

__all__ = ["Decode", "GrowingText", "SampleTexts", "StopSearch", "StopStrings", "first_stop", "text_of"]

Decode = Callable[[list[int]], str]
"""Text of token ids."""

_MAX_WAITING_TOKENS = 16
"""Tokens without a whole character after which their text counts as it is; a character has four bytes at most."""
_UNFINISHED = "�"
"""What a tokenizer shows of bytes that are no whole character yet."""


class SampleTexts(NamedTuple):
    """How the text of a sample is read from its tokens."""

    shown: Decode
    """The text that is answered: by default without special tokens."""
    whole: Decode | None = None
    """The text with special tokens; None: as shown. A stop string may be one of them."""
    end_tokens: Container[int] = ()
    """Tokens that end a sample. They are no part of its text, also where a tokenizer does not know them as special."""

    @classmethod
    def of(cls, tokenizer: Any, end_tokens: Container[int], *, skip_special_tokens: bool) -> SampleTexts:
        """Return how a tokenizer's samples are read."""
        whole = partial(tokenizer.decode, skip_special_tokens=False)
        if not skip_special_tokens:
            return cls(whole, whole, end_tokens)
        return cls(partial(tokenizer.decode, skip_special_tokens=True), whole, end_tokens)

    def text(self, tokens: list[int], finish_reason: str | None, stop_reason: int | str | None) -> str:
        """Return the text of a sample that has ended, without what ended it."""
        ended = finish_reason == "stop" and stop_reason is None and tokens and tokens[-1] in self.end_tokens
        return text_of(tokens[:-1] if ended else tokens, stop_reason, self.shown, self.whole)


class StopStrings:
    """Texts that end a sample; `search` looks for them in one.

    A stop string counts where it stands in the text without special tokens. One that holds a special token counts in
    the text with them, too; a part of a special token's name is no text that a model wrote.
    """

    def __init__(self, stops: Sequence[str], decode: Decode, whole: Decode | None = None) -> None:
        self.stops = tuple(stops)
        self._decoders = [decode] if whole is None else [decode, whole]

    def search(self) -> StopSearch:
        """Return a search in a sample that begins."""
        return StopSearch(self.stops, self._decoders)


class StopSearch:
    """Looks for stop strings in one sample as it grows. A token costs the same, however long the sample is."""

    def __init__(self, stops: Sequence[str], decoders: Sequence[Decode]) -> None:
        self._stops = stops
        self._kept = max(map(len, stops)) - 1
        self._texts = [TextTail(decode) for decode in decoders]
        self._tails = [""] * len(decoders)
        self._decoders = decoders
        self._with_special: set[str] = set()  # the stop strings that hold a special token of this sample

    def append(self, token: int) -> str | None:
        """Return the stop string that `token` completes, None if it completes none."""
        self._note_special(token)
        for i, text in enumerate(self._texts):
            certain, piece = text.append(token)
            seen = self._tails[i] + certain + piece
            if (found := first_stop(seen, self._stops if i == 0 else self._with_special)) is not None:
                return found[1]
            self._tails[i] = (self._tails[i] + certain)[-self._kept :] if self._kept else ""
        return None

    def _note_special(self, token: int) -> None:
        if len(self._decoders) == 1 or self._decoders[0]([token]):
            return
        if name := self._decoders[1]([token]):
            self._with_special.update(stop for stop in self._stops if name in stop)


class TextTail:
    """Reads a growing sample's text piece by piece, decoding few tokens for each."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # those from which on the text is decoded
        self._read = 0  # the text of so many of them is known; they are decoded for the spaces between

    def append(self, token: int) -> tuple[str, str]:
        """Return the text that is certain by now, and after it the part that may change: half a character."""
        self._tokens.append(token)
        piece = self.pending()
        waiting = len(self._tokens) - self._read
        if (not piece or piece.endswith(_UNFINISHED)) and waiting < _MAX_WAITING_TOKENS:
            return "", piece
        self._tokens, self._read = self._tokens[self._read :], waiting
        return piece, ""

    def pending(self) -> str:
        """Return the text that is not certain yet."""
        before = self._decode(self._tokens[: self._read])
        return self._decode(self._tokens)[len(before) :]


def first_stop(text: str, stops: Collection[str]) -> tuple[int, str] | None:
    """Return where the first stop string in `text` begins, and which it is: the longest that begins there."""
    places = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not places:
        return None
    start, _, stop = min(places)
    return start, stop


def text_of(tokens: Sequence[int], stop_reason: int | str | None, decode: Decode, whole: Decode | None = None) -> str:
    """Return the text of a sample that has ended, without what ended it. `whole`: see `SampleTexts`."""
    if isinstance(stop_reason, int):
        tokens = tokens[:-1]
    text = decode(list(tokens))
    if isinstance(stop_reason, str):
        if stop_reason in text:
            return text[: text.index(stop_reason)]
        if whole is not None:
            return _text_before(list(tokens), stop_reason, decode, whole)
    return text


def _text_before(tokens: list[int], stop: str, decode: Decode, whole: Decode) -> str:
    """Return the text shown before a stop string that special tokens are part of."""
    start = whole(tokens).find(stop)
    if start < 0:
        return decode(tokens)
    before = next(count for count in range(len(tokens), -1, -1) if len(whole(tokens[:count])) <= start)
    kept = tokens[:before]
    return decode(kept) + whole(tokens)[len(whole(kept)) : start]


class GrowingText:
    """The text of one sample, handed out piece by piece while it is sampled. A stop token is no part of it."""

    def __init__(self, stops: Sequence[str], decode: Decode, whole: Decode | None = None) -> None:
        self._stops = stops
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._decode = decode
        self._whole = whole
        self._tokens: list[int] = []
        self._tail = TextTail(decode)
        self._text = ""
        self._end = 0

    @property
    def shown(self) -> str:
        """The text that was handed out so far."""
        return self._text[: self._end]

    @property
    def tokens(self) -> list[int]:
        """The tokens that were appended so far."""
        return list(self._tokens)

    def append(self, token: int) -> str:
        """Return the text that `token` makes certain; perhaps none."""
        self._tokens.append(token)
        self._text += self._tail.append(token)[0]
        stop = first_stop(self._text[self._end :], self._stops)
        return self._show(len(self._text) - self._held if stop is None else self._end + stop[0])

    def finish(self, stop_reason: int | str | None) -> str:
        """Return the remaining text once the sample has ended."""
        self._text += self._tail.pending()
        end = self._text.find(stop_reason) if isinstance(stop_reason, str) else -1
        if end < 0 and isinstance(stop_reason, str) and self._whole is not None:
            end = len(_text_before(self._tokens, stop_reason, self._decode, self._whole))
        return self._show(end if end >= 0 else len(self._text))

    def _show(self, end: int) -> str:
        start, self._end = self._end, max(self._end, end)
        return self._text[start : self._end]
