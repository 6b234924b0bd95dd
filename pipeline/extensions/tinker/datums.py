"""Turns training sequences into the SDK's datums, with provenance from the ledger.

Pure. A datum's row t has token t as input and token t + 1 as target; its advantage is 0 where the policy did not sample
the target. Tokens after the last trained one are left out, since nothing is learned there.

Provenance: each run of sampled tokens is a turn of its own; by the ledger, its request's prompt is everything before
it. Its id is GROUP/SAMPLE.SEQUENCE.TURN: the group's id, and the places of sample, sequence and turn in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tinker
from numpy.typing import NDArray
from tinker.types.provenance_spans import PromptProvenanceSpan, ProvenanceSpans, SampledProvenanceSpan

from lachesis.pipeline.trainer.training_sequence import TrainingSequence

__all__ = ["datum_of", "sequence_id"]


class _Turn(NamedTuple):
    """Sampled tokens `[start, end)` of a sequence."""

    start: int
    end: int


def datum_of(sequence: TrainingSequence) -> tinker.Datum:
    """Return the datum of a sequence that has been checked (`sequence_fault`)."""
    mask_T = sequence.loss_mask
    length = int(np.flatnonzero(mask_T)[-1]) + 1
    mask_T = mask_T[:length]
    tokens_T = sequence.tokens[:length].astype(np.int64)
    advantages_T = np.where(mask_T, _whole(sequence.advantage, len(sequence.tokens))[:length], 0)
    logprobs_T = np.where(mask_T, sequence.logprobs[:length], 0)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens_T[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(tokens_T[1:]),
            "logprobs": tinker.TensorData.from_numpy(logprobs_T[1:].astype(np.float32)),
            "advantages": tinker.TensorData.from_numpy(advantages_T[1:].astype(np.float32)),
        },
    )
    turns = _turns(mask_T)
    return datum.with_provenance(
        model_input=_spans(sequence, turns, 0, length - 1), loss_fn_inputs=_spans(sequence, turns, 1, length)
    )


def sequence_id(sequence: TrainingSequence, turn: int) -> str:
    """Return the id of what was sampled in one turn of a sequence."""
    return f"{sequence.group_id}/{sequence.sample}.{sequence.index}.{turn}"


def _whole(advantage: float | NDArray[np.float32], length: int) -> NDArray[np.float32]:
    return np.full(length, advantage, np.float32) if not isinstance(advantage, np.ndarray) else advantage


def _turns(mask_T: NDArray[np.bool_]) -> list[_Turn]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask_T, [False])).astype(np.int8)))
    return [_Turn(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def _spans(sequence: TrainingSequence, turns: list[_Turn], first: int, end: int) -> ProvenanceSpans:
    """Return the runs that tile tokens `[first, end)`."""
    spans: ProvenanceSpans = []
    at = first
    for number, turn in enumerate(turns):
        name = sequence_id(sequence, number)
        prompt_end, sampled_end = min(turn.start, end), min(turn.end, end)
        if prompt_end > at:
            spans.append(PromptProvenanceSpan(sequence_id=name, offset=at, length=prompt_end - at))
            at = prompt_end
        if sampled_end > at:
            spans.append(SampledProvenanceSpan(sequence_id=name, offset=at - turn.start, length=sampled_end - at))
            at = sampled_end
    return spans
