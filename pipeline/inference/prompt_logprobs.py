"""Reads a server's logprobs of the tokens of a prompt. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.inference.answered_sample import MAX_LOGPROB
from lachesis.pipeline.inference.protocol import PromptLogprobs

__all__ = ["PromptTopLogprobs", "read_prompt_logprobs"]

_ID_DIGITS = 9
"""Digits of a token id at most; ids are int32."""


class PromptTopLogprobs(NamedTuple):
    """A model's logprobs of given tokens, nats, at temperature 1.

    `logprobs` float32 [T]: of each token given those before it, 0 at 0. `ids` int32 [T, k] and `top` float32 [T, k]:
    the likeliest tokens, -1 and -inf where there are fewer, as at 0. `version`: the weights that the server says it
    computed with, None if it does not say.
    """

    logprobs: NDArray[np.float32]
    ids: NDArray[np.int32]
    top: NDArray[np.float32]
    version: str | None = None


def read_prompt_logprobs(
    entries: PromptLogprobs | None, token_ids: Sequence[int], k: int, where: str
) -> PromptTopLogprobs:
    """Return the logprobs of `token_ids` and of the `k` likeliest tokens at each place.

    `entries`: as the server answered, by token id as text. `where`: the server's name in messages. Raises
    `UnreadableAnswerError` where they are not those of the tokens.
    """
    if entries is None or len(entries) != len(token_ids):
        raise UnreadableAnswerError(f"{where} sent no prompt logprobs, or not one for each of {len(token_ids)} tokens.")
    logprobs = np.zeros(len(token_ids), np.float32)
    ids, top = np.full((len(token_ids), k), -1, np.int32), np.full((len(token_ids), k), -np.inf, np.float32)
    for position, (token, entry) in enumerate(zip(token_ids[1:], entries[1:], strict=True), 1):
        if entry is None or str(token) not in entry:
            raise UnreadableAnswerError(f"{where} sent no prompt logprob for token {token} at position {position}.")
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
