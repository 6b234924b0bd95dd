"""The policy-gradient loss: clipped surrogate (PPO/GRPO) with clip-higher, dual clip, truncated importance sampling
and a teacher term. Pure: tensors in, a loss and sums of statistics out.

With rho = pi / pi_anchor and advantage A, the loss of one token is -S, where
    S = min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A)        always the smaller surrogate, for A < 0 too
    S = max(S, dual_clip * A)                                           only for A < 0
(PPO, arXiv:1707.06347; clip-higher and token mean, DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729). Under the
decoupled anchor the token's loss is weighted by min(pi_anchor / pi_rollout, tis_cap). The teacher term lowers the
advantage by teacher_coef * k1 with k1 = log pi - log pi_teacher, both without gradient (on-policy distillation).

Statistics are sums, so that micro-batches add up; `LossMetrics.from_sums` divides once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lachesis.pipeline.training.batch import PackedBatch
from lachesis.pipeline.training.config import LossConfig

__all__ = ["LossMetrics", "LossOutput", "LossSums", "grpo_loss", "loss_denominator"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats before exponentiation, so that no ratio overflows float32."""


class LossSums(NamedTuple):
    """Sums over trainable tokens (float64 scalars), to be added over micro-batches and ranks."""

    tokens: torch.Tensor
    clipped: torch.Tensor
    k1: torch.Tensor
    k3: torch.Tensor
    entropy: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    weight_squared: torch.Tensor
    teacher_tokens: torch.Tensor
    teacher_k1: torch.Tensor


class LossOutput(NamedTuple):
    """`loss`: scalar with gradient. `sums`: statistics without."""

    loss: torch.Tensor
    sums: LossSums


class LossMetrics(NamedTuple):
    """Means over trainable tokens. None where nothing was measured."""

    clip_fraction: float | None
    """Share of tokens whose gradient a clip cut off."""
    kl_k1: float | None
    """mean(log pi_rollout - log pi): estimates KL(rollout || policy), nats a token, either sign."""
    kl: float | None
    """mean(w - 1 - log w) with w = pi / pi_rollout (k3): the same divergence, never negative."""
    entropy: float | None
    """Mean entropy of the policy's next-token distribution, nats."""
    ratio_mean: float | None
    """Mean of rho against the anchor."""
    effective_sample_size: float | None
    """(sum w)^2 / (n * sum w^2) with w = pi / pi_rollout: 1 on policy, near 0 when few tokens carry the batch."""
    teacher_kl_k1: float | None
    """mean(log pi - log pi_teacher) over the tokens that have a teacher logprob."""

    @classmethod
    def from_sums(cls, sums: LossSums) -> LossMetrics:
        """Divide the sums of a whole batch."""
        tokens, teacher_tokens = sums.tokens.item(), sums.teacher_tokens.item()
        teacher = sums.teacher_k1.item() / teacher_tokens if teacher_tokens else None
        if not tokens:
            return cls(None, None, None, None, None, None, teacher)
        return cls(
            clip_fraction=sums.clipped.item() / tokens,
            kl_k1=sums.k1.item() / tokens,
            kl=sums.k3.item() / tokens,
            entropy=sums.entropy.item() / tokens,
            ratio_mean=sums.ratio.item() / tokens,
            effective_sample_size=sums.weight.item() ** 2 / (tokens * sums.weight_squared.item()),
            teacher_kl_k1=teacher,
        )


def loss_denominator(batch: PackedBatch, config: LossConfig) -> int:
    """Return what the summed token losses of a whole batch are divided by: at least 1."""
    if config.aggregation == "constant_length":
        return batch.sequences * config.constant_length
    return max(1, batch.trainable_tokens)


def grpo_loss(
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    batch: PackedBatch,
    config: LossConfig,
    *,
    denominator: int,
) -> LossOutput:
    """Return the loss of a (micro-)batch and its statistics.

    `logprobs_BT`: float32 with gradient, of the current policy, at the sampling temperature. `entropy_BT`: float32,
    of the current policy. Both are read under the batch's mask alone. `denominator`: `loss_denominator` of the whole
    batch.
    A batch without trainable tokens gives a loss of 0 with gradient 0.
    """
    mask_BT = batch.mask_BT
    logprobs_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    detached_BT = logprobs_BT.detach()
    mismatch_BT = (detached_BT - batch.logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    anchor_BT = batch.logprobs_BT if config.anchor == "rollout" else detached_BT
    ratio_BT = (logprobs_BT - anchor_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()

    teacher_k1_BT = torch.where(batch.teacher_mask_BT, detached_BT - batch.teacher_logprobs_BT, 0.0)
    advantages_BT = batch.advantages_BT - config.teacher_coef * teacher_k1_BT

    plain_BT = ratio_BT * advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_BT
    surrogate_BT = torch.minimum(plain_BT, clipped_BT)
    cut_BT = clipped_BT < plain_BT
    if config.dual_clip is not None:
        floor_BT = config.dual_clip * advantages_BT
        below_BT = (advantages_BT < 0) & (surrogate_BT < floor_BT)
        surrogate_BT = torch.where(below_BT, floor_BT, surrogate_BT)
        cut_BT = cut_BT | below_BT
    if config.anchor == "proximal" and config.tis_cap is not None:
        surrogate_BT = surrogate_BT * mismatch_BT.exp().clamp(max=config.tis_cap)
    loss = -(surrogate_BT * mask_BT).sum() / denominator

    def total(values_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, values_BT, 0).double().sum()

    weight_BT = mismatch_BT.exp()
    sums = LossSums(
        tokens=mask_BT.double().sum(),
        clipped=total(cut_BT.double()),
        k1=total(-mismatch_BT),
        k3=total(weight_BT - 1 - mismatch_BT),
        entropy=total(entropy_BT.detach()),
        ratio=total(ratio_BT.detach()),
        weight=total(weight_BT),
        weight_squared=total(weight_BT.double() ** 2),
        teacher_tokens=batch.teacher_mask_BT.double().sum(),
        teacher_k1=total(teacher_k1_BT),
    )
    return LossOutput(loss, sums)
