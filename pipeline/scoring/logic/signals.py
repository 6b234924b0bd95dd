"""Signals: the few figures of a group's tokens and logprobs that health checks judge by, so that they need no payload.

In: the sequences of one group. Out: `GroupSignals`, about 12 bytes a sample. A pure function of the group, so a group
that is scored again gives the same. A sample of several sequences is judged over all of its generated tokens.
"""

import math
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.annotations import GroupSignals
from lachesis.schemas.sequences import Sequences

__all__ = ["signals_of"]

_SURE = math.log(0.99)
_RARE_ID = 100_000
"""Byte-pair vocabularies end in their rarest tokens, which fluent text hardly ever holds."""


def signals_of(sequences: Sequences) -> GroupSignals:
    """Return the signals of a group whose columns have been checked."""
    samples = sequences.sample_index or range(len(sequences))
    tokens: list[list[NDArray[np.int32]]] = [[] for _ in range(sequences.n_samples)]
    logprobs: list[list[NDArray[np.float32]]] = [[] for _ in range(sequences.n_samples)]
    last = [""] * sequences.n_samples
    for sequence, sample in zip(sequences, samples, strict=True):
        tokens[sample].append(sequence.tokens[sequence.loss_mask])
        logprobs[sample].append(sequence.logprobs[sequence.loss_mask])
        last[sample] = sequence.finish_reason
    joined = [(np.concatenate(ids), np.concatenate(lps)) for ids, lps in zip(tokens, logprobs, strict=True)]
    return GroupSignals(
        logprobs=[float(lps.mean(dtype=np.float64)) if len(lps) else None for _, lps in joined],
        texts=[zlib.crc32(ids.tobytes()) for ids, _ in joined],
        truncated=sum(reason == "length" for reason in last),
        zeros=sum(int((lps == 0).sum()) for _, lps in joined),
        unlikely=_unlikely(joined),
        sure_run=max((longest_run(lps > _SURE) for _, lps in joined), default=0),
    )


def _unlikely(samples: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> list[int]:
    """Rare tokens that were drawn against the odds, by sample: id > 100k and logprob < -ln V - 2 (prime-rl's filter).

    V, the size of the vocabulary, is not in the payload; the group's largest id is a lower bound. [] where there is
    none.
    """
    largest = max((int(ids.max()) for ids, _ in samples if len(ids)), default=0)
    if largest <= _RARE_ID:
        return []
    bound = -math.log(largest + 1) - 2
    counts = [int(((ids > _RARE_ID) & (lps < bound)).sum()) for ids, lps in samples]
    return counts if any(counts) else []


def longest_run(flags: NDArray[np.bool_]) -> int:
    """Return the length of the longest run of true values."""
    ends = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return int((ends[1::2] - ends[::2]).max()) if len(ends) else 0
