"""One sequence to train on, and what makes it unfit. Pure; no torch.

Dimension suffixes: T tokens, K the teacher's likeliest tokens at a position, C = K + 1 with all others as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOGPROB_SLACK", "TrainingSequence", "form_fault", "sequence_fault", "value_fault"]

LOGPROB_SLACK = 1e-4
"""How far above 0 rounding may lift a log-probability (nats)."""
_MAX_FLOAT32 = float(np.finfo(np.float32).max)

_KINDS = {"b": "bool", "i": "int", "u": "unsigned int", "f": "float"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One sequence to train on. `logprobs[t]` belongs to token t given the tokens before it."""

    tokens: NDArray[np.int32]
    """int32 [T]: prompt and completion."""
    loss_mask: NDArray[np.bool_]
    """bool [T]: true at the tokens the policy sampled. Never at position 0, which no token precedes."""
    logprobs: NDArray[np.float32]
    """float32 [T]: what the rollout sampled with, nats, at the sampling temperature; read where the mask is true."""
    advantage: float | NDArray[np.float32]
    """One value for the sequence, or float32 [T], read where the mask is true."""
    teacher_logprobs: NDArray[np.float32] | None = None
    """float32 [T], nats, read where the mask is true; NaN where the teacher has none for a token, None when it has none
    for this sequence."""
    teacher_spans: NDArray[np.int32] | None = None
    """int32 [T], of a teacher with another tokenizer: where the span begins that a token is in, -1 for none. The first
    token of a span then has the teacher's logprob of the whole span, and the others 0."""
    teacher_topk: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    """int32 [T, K] and float32 [T, K+1]: the teacher's likeliest tokens (-1: none), their logprobs and that of all
    others together; None when it was not requested."""
    prepared: tuple[Any, ...] = ()
    """For each of `training.inputs` what it made of the sequence's columns and attachments."""
    group_id: str = ""
    """The rollout group the sequence belongs to. Without one it is a sample of its own."""
    sample: int = 0
    """Place of its sample in the group. Sequences of the same sample share its weight in the loss."""
    index: int = 0
    """Its own place among the group's sequences."""
    policy_step: int = 0
    """Optimizer step of the oldest policy that sampled it."""


def sequence_fault(sequence: TrainingSequence) -> str | None:
    """Return what is wrong with a sequence, so that it cannot be packed; None if nothing is."""
    if (fault := form_fault(sequence)) is not None:
        return fault
    mask_T = sequence.loss_mask
    if mask_T[0]:
        return "has a true loss mask at position 0, which no token precedes"
    if sequence.tokens.min() < 0:
        return "has a negative token id"
    return _bad_values("logprobs", sequence.logprobs, mask_T) or value_fault(sequence)


def form_fault(sequence: TrainingSequence) -> str | None:
    """Return which array of a sequence has the wrong type or shape; None if none has. It reads no value."""
    columns = _float_columns(sequence)
    wrong = _wrong_type("tokens", sequence.tokens, "iu") or _wrong_type("loss_mask", sequence.loss_mask, "b")
    for name, values_T in columns.items():
        is_number = name == "advantage" and isinstance(values_T, int | float | np.number)
        wrong = wrong or (None if is_number else _wrong_type(name, values_T, "fiu"))
    if wrong:
        return wrong
    length = len(sequence.tokens)
    if length == 0:
        return "has no tokens"
    for name, column in (("loss_mask", sequence.loss_mask), *columns.items()):
        if isinstance(column, np.ndarray) and column.shape != (length,):
            return f"has {length} tokens but {name} of shape {column.shape}"
    return None


def value_fault(sequence: TrainingSequence) -> str | None:
    """Return what is wrong with a sequence's advantage or teacher; None if nothing is.

    They come to a group after it was sampled. The sequence is of the right form; its other columns are not read.
    """
    columns = _float_columns(sequence)
    del columns["logprobs"]
    faults = (_bad_values(name, values_T, sequence.loss_mask) for name, values_T in columns.items())
    return next(filter(None, faults), None) or _teacher_fault(sequence)


def _float_columns(sequence: TrainingSequence) -> dict[str, NDArray[Any] | float]:
    columns: dict[str, NDArray[Any] | float] = {"logprobs": sequence.logprobs, "advantage": sequence.advantage}
    if sequence.teacher_logprobs is not None:
        columns["teacher_logprobs"] = sequence.teacher_logprobs
    return columns


def _teacher_fault(sequence: TrainingSequence) -> str | None:
    """Return what is wrong with the columns of spans or of likeliest tokens; None if nothing is."""
    length = len(sequence.tokens)
    if (spans_T := sequence.teacher_spans) is not None:
        if spans_T.shape != (length,) or (spans_T > np.arange(length)).any():
            return f"has {length} tokens but teacher_spans of shape {spans_T.shape}, or one that begins after its token"
        in_span = spans_T >= 0
        starts = spans_T[in_span]
        if (spans_T[starts] != starts).any():
            return "has teacher_spans that begin inside of another span"
        if not (sequence.loss_mask[starts] == sequence.loss_mask[in_span]).all():
            return "has teacher_spans that are only partly under the loss mask"
    if sequence.teacher_topk is not None:
        ids_TK, logprobs_TC = sequence.teacher_topk
        if ids_TK.ndim != 2 or not ids_TK.shape[1] or logprobs_TC.shape != (length, ids_TK.shape[1] + 1):
            return f"has {length} tokens but teacher_topk of shapes {ids_TK.shape} and {logprobs_TC.shape}"
        given = logprobs_TC[sequence.loss_mask & (ids_TK[:, 0] >= 0)]
        if len(ids_TK) != length or np.isnan(given).any() or (given > LOGPROB_SLACK).any():
            return "has teacher_topk logprobs that are none, or of another number of tokens"
    return None


def _wrong_type(name: str, values: object, kinds: str) -> str | None:
    """Return that `values` is no array of one of the numpy `kinds` ("b" bool, "i" and "u" integers, "f" floats)."""
    if isinstance(values, np.ndarray) and values.dtype.kind in kinds and values.ndim:
        return None
    found = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else f"{values!r:.80}"
    return f"has {found} as {name}; give a numpy array of {' or '.join(_KINDS[kind] for kind in kinds)}"


def _bad_values(name: str, values_T: NDArray[Any] | float, mask_T: NDArray[np.bool_]) -> str | None:
    if not isinstance(values_T, np.ndarray):
        return None if abs(values_T) <= _MAX_FLOAT32 else f"has {name} that are not finite"
    under_mask = values_T[mask_T]
    with np.errstate(over="ignore"):  # what is too large for the tensors is as bad as infinite
        under_mask = under_mask.astype(np.float32)
    if name == "teacher_logprobs":
        under_mask = under_mask[~np.isnan(under_mask)]
    if not np.isfinite(under_mask).all():
        return f"has {name} that are not finite"
    if name.endswith("logprobs") and under_mask.size and under_mask.max() > LOGPROB_SLACK:
        return f"has {name} above 0, which no log-probability is"
    return None
