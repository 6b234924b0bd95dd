"""The figures of one optimizer step."""

from __future__ import annotations

import msgspec

__all__ = ["StepMetrics"]


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one optimizer step. Names follow `train/*` of the logs; see `LossMetrics` for the formulas."""

    step: int
    """Optimizer steps taken so far, this one included."""
    loss: float
    grad_norm: float
    """L2 norm of the batch's gradient before clipping."""
    learning_rate: float
    """That of this step, warm-up and schedule counted in."""
    step_kl: float | None
    """KL(before || after) of the step as it was taken, nats a token; None: not measured."""
    step_share: float
    """Share of the step that was taken: below 1 where it was shortened."""
    large_step: str | None
    """What to say of a step beyond `max_step_kl`, else None."""
    entropy: float
    kl: float
    kl_k1: float
    clip_fraction: float
    masked_fraction: float
    ratio_mean: float
    effective_sample_size: float
    teacher_kl_k1: float | None
    teacher_kl_topk: float | None
    reference_kl: float | None
    sequences: int
    tokens: int
    """All tokens, padding left out."""
    trainable_tokens: int
    padding: float
    """Share of the tokens computed that were padding, 0 to 1."""
    shared: float
    """Share of the tokens that were computed with another row's, since the rows begin alike, 0 to 1."""
    seconds: float
    """Wall time of the step."""
    microbatch_tokens: int
    """Most padded tokens that a micro-batch had: the setting, or less where that did not fit into memory."""
    packed: bool
    """Whether the rows of a micro-batch were computed in one, without padding."""
    mismatches: dict[str, list[float]]
    """By group of this rank's share, how far its logprobs are from the rollout's: see `mismatch_sums`."""
    memory: str | None
    """What to say of a step that is divided because memory ran out, else None."""
