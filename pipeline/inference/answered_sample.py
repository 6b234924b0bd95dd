"""Reads a sample of an inference server's answer: tokens, logprobs and what came with them. Pure.

Guarantees: a sample has one finite logprob for each token, and version spans that cover it.
"""

from __future__ import annotations

import base64
import io
from typing import Any, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.errors import UnreadableAnswerError
from lachesis.pipeline.inference.protocol import Choice, FinishReason, WeightVersionSpan
from lachesis.pipeline.inference.sampling_mask import MaskRows, decode_mask

__all__ = ["MAX_LOGPROB", "GeneratedSample", "read_sample"]

MAX_LOGPROB = 0.01
"""Nats: a probability of 1, and what rounding adds to it."""
_MAX_EXPERT = 32767
"""Highest number of an expert that a column holds."""
_FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


class GeneratedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    token_ids: NDArray[np.int32]
    """int32 [N], the stop token included."""
    logprobs: NDArray[np.float32]
    """float32 [N], nats, at the sampling temperature, of the weights that sampled the token."""
    text: str
    """Without special tokens."""
    finish_reason: str
    """stop, length or abort."""
    weight_versions: list[WeightVersionSpan]
    """Contiguous from 0 to N. Empty for an empty sample."""
    routed_experts: NDArray[np.int16] | None = None
    """int16 [rows, layers * k]: experts that processed the first tokens of prompt and sample; None: not recorded."""
    sampling_mask: MaskRows | None = None
    """The ids among which each token was sampled; None: not requested, or not known to the server."""


def read_sample(choice: Choice, where: str, max_tokens: int | None = None) -> GeneratedSample:
    """Return the sample of a choice in an answer of the server `where`.

    Raises `UnreadableAnswerError` where it lacks something, has more than `max_tokens` tokens, or contradicts itself.
    """
    tokens, content = choice.token_ids, choice.logprobs.content if choice.logprobs else None
    if tokens is None or content is None or choice.text is None:
        raise UnreadableAnswerError(f"{where} left out token ids, logprobs or text of a sample.")
    reason = choice.finish_reason
    if reason is None or reason not in _FINISH_REASONS:
        raise UnreadableAnswerError(
            f"{where} sent the finish_reason {reason!r:.40} of a sample, none of {', '.join(_FINISH_REASONS)}"
        )
    if not tokens and reason != "abort":
        raise UnreadableAnswerError(f"{where} sent a sample without a token ({choice.finish_reason!r:.40})")
    if max_tokens is not None and len(tokens) > max_tokens:
        raise UnreadableAnswerError(f"{where} sent {len(tokens)} tokens of a sample, not {max_tokens}.")
    logprobs = np.array([entry.logprob for entry in content], np.float32)
    if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
        raise UnreadableAnswerError(f"{where} sent {len(logprobs)} logprobs, finite or not, for {len(tokens)} tokens.")
    if logprobs.max(initial=0.0) > MAX_LOGPROB:
        raise UnreadableAnswerError(f"{where} sent a logprob of {logprobs.max():g}, which is no probability.")
    spans = choice.weight_versions or []
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != len(tokens) or [span.start for span in spans] != edges[:-1]:
        raise UnreadableAnswerError(
            f"{where} sent weight versions that do not cover the {len(tokens)} tokens of a sample."
        )
    token_ids = np.array(tokens, np.int32)
    return GeneratedSample(
        token_ids=token_ids,
        logprobs=logprobs,
        text=choice.text,
        finish_reason=reason,
        weight_versions=spans,
        routed_experts=None if choice.routed_experts is None else _experts(choice.routed_experts, where),
        sampling_mask=None if choice.sampling_mask is None else _mask(choice.sampling_mask, token_ids, where),
    )


def _mask(encoded: str, token_ids: NDArray[np.int32], where: str) -> MaskRows:
    try:
        return decode_mask(encoded, token_ids)
    except ValueError as error:
        raise UnreadableAnswerError(f"{where} sent a sampling_mask that cannot be read: {error}") from error


def _experts(encoded: str, where: str) -> NDArray[np.int16]:
    try:
        found = _integers(encoded)
    except ValueError as error:
        raise UnreadableAnswerError(f"{where} sent routed_experts that cannot be read: {error}") from error
    if not 0 <= found.min(initial=0) <= found.max(initial=0) <= _MAX_EXPERT:
        raise UnreadableAnswerError(f"{where} sent an expert that is none of 0 to {_MAX_EXPERT}.")
    experts: NDArray[np.int16] = found.reshape(len(found), found.shape[1] * found.shape[2]).astype(np.int16)
    return experts


def _integers(encoded: str) -> NDArray[Any]:
    """Return the integers [rows, layers, k] of a numpy file in base64, without a copy. Raises ValueError."""
    file = io.BytesIO(base64.b64decode(encoded, validate=True))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("its format is not version 1.0")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file)
    if len(shape) != 3 or dtype.kind not in "iu":
        raise ValueError(f"shape {shape} and type {dtype}, where integers by token, layer and place are needed")
    return np.frombuffer(file.getbuffer()[file.tell() :], dtype).reshape(shape, order="F" if by_column else "C")
