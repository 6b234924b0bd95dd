"""Computes statistics of a group's tokens and logprobs, so that health checks need no payload.

From the sequences of one group it computes `GroupSignals`, about 12 bytes a sample. It is a pure function of the group,
so a group that is scored again gives the same. If a sample has several sequences, its statistics cover all of its
generated tokens.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.annotations import GroupSignals
from lachesis.schemas.sequences import Sequences

__all__ = ["distinct_share", "signals_of"]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
_SURE_LOGPROB = math.log(0.99)
_LONG = 32
"""Tokens from which on an answer says how varied it is."""
_TAIL = 256
"""Tokens at its end that say so: loops are there, and the share of distinct n-grams depends on how many are counted."""
_PACKED_BITS = 21
"""Bits of an id, for three of them to fit in one integer."""
_RARE_ID = 100_000
"""Byte-pair vocabularies end in their rarest tokens, which fluent text hardly ever holds."""


def signals_of(sequences: Sequences, generation: Mapping[str, Any] | None = None) -> GroupSignals:
    """Return the signals of a group whose columns have been checked.

    `generation` are its sampling parameters. Where they leave one token to choose from now and then (temperature 0,
    nucleus, top-k, min-p), that has a probability of 1 by right, so that `zeros` and `sure_run` would say nothing.
    """
    ids, lps, _ = sequences.generated
    samples = sequences.generated.samples
    distinct, shared = _distinct_and_shared(ids, samples)
    known = _of_logprobs(ids, lps, samples) if lps is not None else {"logprobs": [None] * len(samples)}
    return GroupSignals(
        texts=[zlib.crc32(ids[s].data) for s in samples],
        truncated=sequences.endings.count("length"),
        distinct=distinct,
        shared=shared,
        greedy=_number(generation, "temperature", 1.0) < GREEDY_BELOW,
        **known | ({"zeros": 0, "sure_run": 0} if _narrowed(generation) else {}),
    )


def _narrowed(generation: Mapping[str, Any] | None) -> bool:
    return (
        _number(generation, "temperature", 1.0) < GREEDY_BELOW
        or _number(generation, "top_p", 1.0) < 1
        or _number(generation, "top_k", 0) > 0
        or _number(generation, "min_p", 0) > 0
    )


def _number(generation: Mapping[str, Any] | None, name: str, default: float) -> float:
    value = (generation or {}).get(name)
    return value if isinstance(value, int | float) else default


def _of_logprobs(ids: NDArray[np.int32], lps: NDArray[np.float32], samples: list[slice]) -> dict[str, Any]:
    return {
        "logprobs": [
            float(np.add.reduce(lps[s], dtype=np.float64)) / (s.stop - s.start) if s.stop > s.start else None
            for s in samples
        ],
        "zeros": len(lps) - int(np.count_nonzero(lps)),
        "unlikely": _unlikely(ids, lps, samples),
        "sure_run": longest_run(lps > _SURE_LOGPROB, samples),
    }


def distinct_share(ids: NDArray[np.int32]) -> float:
    """Return the share of distinct 3-grams, 1 if there is none.

    Distinct-n: Li et al. 2016, arXiv:1510.03055.
    """
    if len(ids) < 3:
        return 1.0
    grams = _grams(ids)
    return len(np.unique(grams)) / len(grams)


def _distinct_and_shared(ids: NDArray[np.int32], samples: list[slice]) -> tuple[float | None, float | None]:
    """Return the mean share of distinct 3-grams, and how far samples share them, of samples that are long enough.

    None where none is, and for the second where fewer than two are.
    """
    tails = [slice(max(s.start, s.stop - _TAIL), s.stop - 2) for s in samples if s.stop - s.start >= _LONG]
    if not tails:
        return None, None
    lengths = [tail.stop - tail.start for tail in tails]
    width = max(lengths)
    grams = _grams(ids)
    rows = np.empty((len(tails), width), dtype=np.int64)
    for row, tail, length in zip(rows, tails, lengths, strict=True):
        row[:length] = grams[tail]
        if length < width:
            row[length:] = grams[tail.start]  # once more, which makes no further distinct one
    rows.sort(axis=1)
    first = np.ones(rows.shape, dtype=np.bool_)
    np.not_equal(rows[:, 1:], rows[:, :-1], out=first[:, 1:])
    distinct = np.count_nonzero(first, axis=1).tolist()
    share = math.fsum(found / length for found, length in zip(distinct, lengths, strict=True)) / len(tails)
    return share, _overlap(rows[first], len(tails))


def _overlap(grams: NDArray[np.int64], samples: int) -> float | None:
    """Return the chance that one of `grams`, the distinct ones of each sample, is in another sample drawn at random."""
    if samples < 2:
        return None
    grams.sort()
    edges = np.flatnonzero(np.diff(grams, prepend=grams[0] - 1, append=grams[-1] + 1))
    samples_with_gram = np.diff(edges)
    return int((samples_with_gram * (samples_with_gram - 1)).sum()) / ((samples - 1) * len(grams))


def _grams(ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return a number for each 3-gram of ids [G - 2], the same for those that are the same."""
    if int(ids.max()) >> _PACKED_BITS or int(ids.min()) < 0:
        found = np.unique(np.lib.stride_tricks.sliding_window_view(ids, 3), axis=0, return_inverse=True)
        return found[1].reshape(-1)
    wide = ids.astype(np.int64)
    grams = wide[:-2] << 2 * _PACKED_BITS
    grams |= wide[1:-1] << _PACKED_BITS
    grams |= wide[2:]
    return grams


def _unlikely(ids: NDArray[np.int32], lps: NDArray[np.float32], samples: list[slice]) -> list[int]:
    """Rare tokens that were drawn against the odds, by sample: id > 100k and logprob < -ln V - 2 (prime-rl's filter).

    V, the size of the vocabulary, is not in the payload; the group's largest id is a lower bound. [] where there is
    none.
    """
    largest = int(ids.max(initial=0))
    if largest <= _RARE_ID:
        return []
    bound = -math.log(largest + 1) - 2
    found = (ids > _RARE_ID) & (lps < bound)
    counts = [int(np.count_nonzero(found[s])) for s in samples]
    return counts if any(counts) else []


def longest_run(flags: NDArray[np.bool_], samples: list[slice]) -> int:
    """Return the length of the longest run of true values in any of the samples, which follow one another."""
    padded = np.zeros(len(flags) + len(samples) + 1, dtype=np.bool_)  # a false one before each sample, and at the end
    for i, s in enumerate(samples):
        padded[s.start + i + 1 : s.stop + i + 1] = flags[s]
    ends = np.flatnonzero(padded[1:] != padded[:-1])
    return int((ends[1::2] - ends[::2]).max()) if len(ends) else 0
