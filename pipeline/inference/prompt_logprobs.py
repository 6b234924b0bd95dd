"""Reads a server's logprobs of the tokens of a prompt. Pure."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.inference.answered_sample import MAX_LOGPROB
from lachesis.pipeline.inference.protocol import PromptLogprobs
from lachesis.schemas.codec import UNREADABLE

__all__ = ["PromptTopLogprobs", "read_prompt_logprobs"]

_ID_DIGITS = 9
"""Digits of a token id at most; ids are int32."""


class PromptTopLogprobs(NamedTuple):
    """A model's logprobs of given tokens, nats, at temperature 1.

    `logprobs` float32 [T]: of each token given those before it, 0 at the first of a prompt. `ids` int32 [T, k] and
    `top` float32 [T, k]: the likeliest tokens, -1 and -inf where there are fewer, as at the first of a prompt.
    `version`: the weights that the server says it computed with, None if it does not say.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    top: NDArray[np.float32]
    version: str | None = None

    def rows(self, part: slice) -> Self:
        """Return those of some tokens."""
        return self._replace(logprobs=self.logprobs[part], ids=self.ids[part], top=self.top[part])

    def followed_by(self, rest: Self) -> Self:
        """Return those of its tokens and of `rest`, computed with the weights of `rest`."""
        columns = zip(self[:3], rest[:3], strict=True)
        logprobs, ids, top = (np.concatenate(column) for column in columns)
        return rest._replace(logprobs=logprobs, ids=ids, top=top)


def read_prompt_logprobs(
    entries: Sequence[msgspec.Raw] | None, token_ids: Sequence[int], k: int, where: str, start: int = 0
) -> PromptTopLogprobs:
    """Return the logprobs of `token_ids` from `start` on, and of the `k` likeliest tokens at each place.

    `entries`: as the server answered, by token id as text, of all tokens; those before `start` are not looked into.
    `where`: the server's name in messages. Raises `UnreadableAnswerError` where they are not those of the tokens.
    """
    if entries is None or len(entries) != len(token_ids):
        raise UnreadableAnswerError(f"{where} sent no prompt logprobs, or not one for each of {len(token_ids)} tokens.")
    try:
        found = msgspec.json.decode(b"[%b]" % b",".join(entries[start:]), type=PromptLogprobs)
    except UNREADABLE as error:
        raise UnreadableAnswerError(f"{where} sent prompt logprobs that are none: {error}.") from error
    return _read_entries(found, token_ids[start:], k, where, start)


def _read_entries(
    entries: PromptLogprobs, token_ids: Sequence[int], k: int, where: str, start: int
) -> PromptTopLogprobs:
    logprobs = np.zeros(len(token_ids), np.float32)
    ids, top = np.full((len(token_ids), k), -1, np.int32), np.full((len(token_ids), k), -np.inf, np.float32)
    for position, (token, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if start + position == 0:
            continue
        if entry is None or str(token) not in entry:
            raise UnreadableAnswerError(
                f"{where} sent no prompt logprob for token {token} at position {start + position}."
            )
        if (logprob := entry[str(token)].logprob) > MAX_LOGPROB:
            raise UnreadableAnswerError(f"{where} sent a logprob of {logprob:g}, which is no probability.")
        logprobs[position] = logprob
        if k:  # there are k, or k and the given token
            if not all(other.isdecimal() and len(other) <= _ID_DIGITS for other in entry):
                raise UnreadableAnswerError(f"{where} sent prompt logprobs of something that is no token id.")
            likeliest = sorted((-about.logprob, int(other)) for other, about in entry.items())[:k]
            ids[position, : len(likeliest)] = [other for _, other in likeliest]
            top[position, : len(likeliest)] = [-value for value, _ in likeliest]
    return PromptTopLogprobs(logprobs, ids, top)
