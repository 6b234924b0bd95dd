"""Turns the teacher's answers, one a sequence, into the columns of a group. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.columns import as_bytes
from lachesis.schemas.errors import DataError
from lachesis.schemas.rollout import RolloutGroup

__all__ = ["group_logprobs", "group_spans", "group_top_k"]

_MIN_TAIL_PROBABILITY = 1e-6
"""What rounding leaves of the probability of all other tokens, at least: none is impossible."""


def group_logprobs(group: RolloutGroup, answers: Sequence[NDArray[np.float32] | None]) -> tuple[bytes, list[int]]:
    """Return the logprobs float32 [T] of a group as bytes, and the sequences without any.

    `answers` holds for each sequence float32 [its tokens], of token t given those before it, or None where the teacher
    failed; those positions are 0, as is every first one. Raises `DataError` on a wrong length or a value that is not
    finite.
    """
    cuts = group.sequences.cuts()
    logprobs = np.zeros(group.sequences.n_tokens, np.float32)
    missing = []
    for i, answer in enumerate(answers):
        start, stop = int(cuts[i]), int(cuts[i + 1])
        if answer is None:
            missing.append(i)
            continue
        if answer.shape != (stop - start,) or not np.isfinite(answer).all():
            raise DataError(
                f"group {group.id}, sequence {i}: {answer.shape} teacher logprobs for {stop - start} tokens"
            )
        logprobs[start + 1 : stop] = answer[1:]
    return as_bytes(logprobs, "float32"), missing


def group_top_k(
    group: RolloutGroup, answers: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]] | None], k: int
) -> dict[str, bytes | int]:
    """Return the top-k columns of `TeacherLogprobs`.

    `answers` holds for each sequence int32 and float32 [its tokens, k], -1 and -inf where there are fewer, or None.
    """
    cuts, total = group.sequences.cuts(), group.sequences.n_tokens
    ids, logprobs = np.full((total, k), -1, np.int32), np.full((total, k), -np.inf, np.float64)
    for i, answer in enumerate(answers):
        if answer is not None:
            ids[cuts[i] : cuts[i + 1]], logprobs[cuts[i] : cuts[i + 1]] = answer
    mass = np.exp(logprobs).sum(-1)
    tail = np.log(np.maximum(1 - mass, _MIN_TAIL_PROBABILITY))
    return {
        "k": k,
        "topk_ids": as_bytes(ids, "int32"),
        "topk_logprobs": as_bytes(np.maximum(logprobs, np.where(ids < 0, -np.inf, -6e4)), "float16"),
        "topk_mass": as_bytes(mass, "float16"),
        "topk_tail": as_bytes(tail, "float16"),
    }


def group_spans(
    group: RolloutGroup, answers: Sequence[Sequence[tuple[slice, float]] | None]
) -> tuple[dict[str, bytes], list[int]]:
    """Return the columns of spans of `TeacherLogprobs`, and the sequences without any.

    `answers` holds for each sequence its spans, each with the teacher's logprob of it, or None where there are none.
    """
    cuts, total = group.sequences.cuts(), group.sequences.n_tokens
    starts, logprobs = np.full(total, -1, np.int32), np.zeros(total, np.float32)
    for i, answer in enumerate(answers):
        for span, logprob in answer or ():
            starts[cuts[i] + span.start : cuts[i] + span.stop] = span.start
            logprobs[cuts[i] + span.start] = logprob
    columns = {"span_starts": as_bytes(starts, "int32"), "span_logprobs": as_bytes(logprobs, "float32")}
    return columns, [i for i, answer in enumerate(answers) if not answer]
