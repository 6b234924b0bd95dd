"""The policy-gradient loss: tensors in, a loss and sums of statistics out. Pure.

Of one token with advantage A, rho = pi / pi_anchor and w = pi / pi_rollout, the loss is -S, by objective:

    ppo    S = min(rho * A, clip(rho, 1 - clip_low, 1 + clip_high) * A), and at least dual_clip * A where A < 0
           (arXiv:1707.06347; clip-higher and the token mean, DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729)
    gspo   the same with the sequence's ratio exp(mean log rho), whose gradient each token shares, and no dual clip
           (arXiv:2507.18071, its token-wise form)
    cispo  S = clip(rho, 1 - clip_low, 1 + clip_high) * A * log pi, the ratio without gradient (arXiv:2506.13585)
    sapo   S = 4 / tau * sigmoid(tau * (rho - 1)) * A, a gate in place of the clip, whose slope is 1 where rho is 1; tau
           is tau_positive where A > 0 and tau_negative elsewhere (arXiv:2511.20347)
    dppo   S = rho * A, or 0 where the token is beyond the trust region and A would move it further: A * (rho - 1) > 0
           and the divergence of (pi, 1 - pi) from (pi_rollout, 1 - pi_rollout) exceeds max_divergence
           (arXiv:2602.04879, binary total variation or binary KL)

Engine and trainer differ by w. Under the proximal anchor S is weighted by it: truncated importance sampling takes
min(w, tis_cap). With `outside = "mask"` tokens beyond [tis_floor, tis_cap] give nothing: masked importance sampling,
IcePop where there is a floor (arXiv:2510.18855). Three masks leave out tokens by their whole sequence, in which w_mean
is the geometric mean of w over its trained tokens, exp(mean log w):

    sequence_cap           all, if the product of w exceeds it
    geometric_floor, _cap  all, if w_mean is beyond them (geometric sequence masking)
    off_policy_threshold   those with A < 0, if -log w_mean exceeds it: what the policy has moved away from anyway is
                           not pushed further (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, equation 9)

Two terms lower the advantage, both without gradient: teacher_coef * (log pi - log pi_teacher), on-policy distillation,
and under kl_estimator = "k1" kl_coef * (log pi - log pi_reference). Under "k3" the loss gains kl_coef times
pi_reference / pi - 1 - log(pi_reference / pi), with gradient (GRPO, arXiv:2402.03300). It loses entropy_coef times the
entropy.

A teacher of another tokenizer gives logprobs of spans, runs of tokens; every token of a span then has the distance of
the whole span, sum(log pi) - log pi_teacher(span), for by the chain rule that is one action's. With `teacher_kl` and
the teacher's K likeliest tokens the loss gains teacher_coef * KL at each token instead, with gradient, where KL is over
K + 1 outcomes, the last of them "any other token":

    reverse   sum_c pi_c * log(pi_c / pi_teacher_c)
    forward   sum_c pi_teacher_c * log(pi_teacher_c / pi_c)

(both in on-policy distillation, arXiv:2306.13649; by the log-sum inequality, Cover & Thomas, theorem 2.7.1, either is
at most the divergence over all tokens; without the last outcome it may be 0 for distributions far apart.)

A sample s may have several sequences j, each with its own context: those of sub-agents, forks, and histories that were
rewritten. With T_sj trained tokens in each of k_s sequences, T_s = sum_j T_sj, and N samples in the batch, the loss is

    sum_s sum_j sum_t  c_s * d_sj * (the loss of token t),   with the advantage of the sample at each of its tokens

    c_s    token_mean 1 / sum_s T_s,  sequence_mean 1 / (N * T_s),  constant_length 1 / (N * constant_length)
    d_sj   sharing = "tokens" 1,  "sequences" T_s / (k_s * T_sj)

Whatever k_s is, sum_j T_sj * d_sj = T_s: a sample weighs what it would as one sequence, and with "tokens" its gradient
is that of one sequence as well. That is the policy gradient: by the chain rule log p(sample) = sum_j sum_t log pi, so
grad E[R] = E[(R - b) sum_j sum_t grad log pi] if each sampled token is trained once (`trained_calls`) and b does not
depend on the sample's own actions, the number of its sequences among them. A baseline over sequences, or a loss that
counts sequences, depends on it, and pays for or against every further sequence (verl#7244 shows the same of turns).
Baselines are over samples (`normalizer/estimators`). Ratios and masks of a sequence stay those of one sequence.

Statistics are sums, so that micro-batches add up; `LossMetrics.from_sums` divides once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lachesis.pipeline.trainer.collectives import ALONE, Ranks
from lachesis.pipeline.trainer.config import LossConfig
from lachesis.pipeline.trainer.packed_batch import PackedBatch

__all__ = ["LossMetrics", "LossOutput", "LossSums", "loss_denominator", "policy_loss"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 nats before exponentiation, so that no ratio overflows float32."""
_MIN_LOGPROB_NATS = -100.0
"""Below it a token's probability is 0 in float32, and its logprob has no gradient here."""
_SURE_EPSILON = 1e-6
"""Distance that probabilities keep from 0 and 1 in a binary KL."""


class LossSums(NamedTuple):
    """Sums over trainable tokens (float64 scalars), to be added over micro-batches and ranks."""

    tokens: torch.Tensor
    clipped: torch.Tensor
    masked: torch.Tensor
    k1: torch.Tensor
    k3: torch.Tensor
    entropy: torch.Tensor
    ratio: torch.Tensor
    weight: torch.Tensor
    weight_squared: torch.Tensor
    teacher_tokens: torch.Tensor
    teacher_k1: torch.Tensor
    teacher_topk_tokens: torch.Tensor
    teacher_topk_kl: torch.Tensor
    reference_tokens: torch.Tensor
    reference_k3: torch.Tensor


class LossOutput(NamedTuple):
    """`loss`: scalar with gradient. `sums`: statistics without."""

    loss: torch.Tensor
    sums: LossSums


class LossMetrics(NamedTuple):
    """Means over trainable tokens. None where nothing was measured."""

    clip_fraction: float | None
    """Share of tokens whose gradient the objective cut off or bounded."""
    masked_fraction: float | None
    """Share of tokens left out because engine and trainer differ too much."""
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
    teacher_kl_topk: float | None
    """Mean KL over the teacher's likeliest tokens and all others as one, in the direction that is trained."""
    reference_kl: float | None
    """mean(r - 1 - log r) with r = pi_reference / pi: estimates KL(policy || reference), nats a token."""

    @classmethod
    def from_sums(cls, sums: LossSums) -> LossMetrics:
        """Divide the sums of a whole batch."""
        tokens = sums.tokens.item()
        return cls(
            clip_fraction=_mean(sums.clipped, tokens),
            masked_fraction=_mean(sums.masked, tokens),
            kl_k1=_mean(sums.k1, tokens),
            kl=_mean(sums.k3, tokens),
            entropy=_mean(sums.entropy, tokens),
            ratio_mean=_mean(sums.ratio, tokens),
            effective_sample_size=_mean(sums.weight**2 / sums.weight_squared, tokens),
            teacher_kl_k1=_mean(sums.teacher_k1, sums.teacher_tokens.item()),
            teacher_kl_topk=_mean(sums.teacher_topk_kl, sums.teacher_topk_tokens.item()),
            reference_kl=_mean(sums.reference_k3, sums.reference_tokens.item()),
        )


def loss_denominator(batch: PackedBatch, config: LossConfig, ranks: Ranks = ALONE) -> int:
    """Return what the summed token losses of a whole batch, over all ranks, are divided by: at least 1."""
    counted = batch.trainable_tokens
    if config.averaging == "constant_length":
        counted = len(set(batch.sample_ids)) * config.constant_length
    if config.averaging == "sequence_mean":
        trained = batch.mask_BT.any(dim=1).tolist()
        counted = len({name for name, is_trained in zip(batch.sample_ids, trained, strict=False) if is_trained})
    return max(1, int(ranks.sum([counted])[0]))


def policy_loss(
    logprobs_BT: torch.Tensor,
    entropy_BT: torch.Tensor,
    batch: PackedBatch,
    config: LossConfig,
    *,
    denominator: int,
    reference_BT: torch.Tensor | None = None,
    others_BTC: torch.Tensor | None = None,
) -> LossOutput:
    """Return the loss of a (micro-)batch and its statistics.

    `logprobs_BT`: float32 with gradient, of the current policy, at the sampling temperature. `entropy_BT`: float32, of
    the current policy, with gradient where `entropy_coef` is to have one. `reference_BT`: float32 logprobs of the
    reference model. `others_BTC`: float32 with gradient, the current policy's logprobs of the teacher's likeliest
    tokens and, last, of all others together; needed where `teacher_kl` asks for them. All are read under the batch's
    mask alone. `denominator`: `loss_denominator` of the whole batch.
    A batch without trainable tokens gives a loss of 0 with gradient 0.
    """
    mask_BT = batch.mask_BT
    logprobs_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    detached_BT = logprobs_BT.detach()
    mismatch_BT = (detached_BT - batch.logprobs_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    anchor_BT = batch.logprobs_BT if config.anchor == "rollout" else detached_BT

    teacher_k1_BT = torch.where(batch.teacher_mask_BT, detached_BT - batch.teacher_logprobs_BT, 0.0)
    advantages_BT = batch.advantages_BT
    if config.teacher_kl == "sampled":
        advantages_BT = advantages_BT - config.teacher_coef * _of_span(teacher_k1_BT, batch)
    reference_k3_BT = torch.zeros_like(logprobs_BT)
    if reference_BT is not None:
        to_reference_BT = (torch.where(mask_BT, reference_BT, 0.0) - logprobs_BT).clamp(max=LOG_RATIO_LIMIT)
        reference_k3_BT = to_reference_BT.exp() - 1 - to_reference_BT
        if config.kl_estimator == "k1":
            advantages_BT = advantages_BT + config.kl_coef * to_reference_BT.detach()

    log_ratio_BT = _log_ratio(logprobs_BT - anchor_BT, mask_BT, config)
    ratio_BT = log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    surrogate_BT, cut_BT = _surrogate(ratio_BT, logprobs_BT, advantages_BT, batch.logprobs_BT, config)
    kept_BT = _agreeing(mismatch_BT, advantages_BT, mask_BT, config)
    weight_BT = _weight(mismatch_BT, config)
    token_loss_BT = -surrogate_BT * weight_BT * kept_BT
    if config.kl_estimator == "k3" and reference_BT is not None:
        token_loss_BT = token_loss_BT + config.kl_coef * reference_k3_BT
    topk_kl_BT, topk_mask_BT = _topk_kl(others_BTC, batch, config)
    if config.teacher_kl != "sampled":
        token_loss_BT = token_loss_BT + config.teacher_coef * topk_kl_BT
    if config.entropy_coef:
        token_loss_BT = token_loss_BT - config.entropy_coef * torch.where(mask_BT, entropy_BT, 0.0)
    loss = (token_loss_BT * _share(batch, config)).sum() / denominator

    def total(values_BT: torch.Tensor, where_BT: torch.Tensor = mask_BT) -> torch.Tensor:
        return torch.where(where_BT, values_BT.detach().double(), 0).sum()

    w_BT = mismatch_BT.exp().double()
    none = torch.zeros_like(mask_BT)
    sums = LossSums(
        tokens=mask_BT.double().sum(),
        clipped=total(cut_BT),
        masked=total(~kept_BT),
        k1=total(-mismatch_BT),
        k3=total(w_BT - 1 - mismatch_BT),
        entropy=total(entropy_BT),
        ratio=total(ratio_BT),
        weight=total(w_BT),
        weight_squared=total(w_BT**2),
        teacher_tokens=batch.teacher_mask_BT.double().sum(),
        teacher_k1=total(teacher_k1_BT),
        teacher_topk_tokens=topk_mask_BT.double().sum(),
        teacher_topk_kl=total(topk_kl_BT),
        reference_tokens=(none if reference_BT is None else mask_BT).double().sum(),
        reference_k3=total(reference_k3_BT),
    )
    return LossOutput(loss, sums)


def _of_span(values_BT: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return for each token the sum over its span."""
    if batch.teacher_spans_BT is None:
        return values_BT
    sums_BT = torch.zeros_like(values_BT).scatter_add(1, batch.teacher_spans_BT, values_BT)
    return sums_BT.gather(1, batch.teacher_spans_BT)


def _topk_kl(
    others_BTC: torch.Tensor | None, batch: PackedBatch, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KL of each token over K + 1 outcomes, 0 where the teacher named none, and where it did."""
    topk_BTC, mask_BT = batch.teacher_topk_BTC, batch.teacher_topk_mask_BT
    if config.teacher_kl == "sampled" or others_BTC is None or topk_BTC is None or mask_BT is None:
        return torch.zeros_like(batch.logprobs_BT), torch.zeros_like(batch.mask_BT)
    there_BTC = torch.isfinite(topk_BTC) & mask_BT[..., None]
    # half precision on the wire: brought back to a sum of 1, so that no divergence is below 0
    teacher_BTC = torch.where(mask_BT[..., None], topk_BTC, 0.0).log_softmax(-1)
    teacher_BTC = torch.where(there_BTC, teacher_BTC, 0.0)
    policy_BTC = torch.where(there_BTC, others_BTC.clamp(min=_MIN_LOGPROB_NATS), 0.0)
    apart_BTC = policy_BTC - teacher_BTC
    terms_BTC = policy_BTC.exp() * apart_BTC if config.teacher_kl == "reverse" else -teacher_BTC.exp() * apart_BTC
    return torch.where(there_BTC, terms_BTC, 0.0).sum(-1), mask_BT


def _log_ratio(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Return log rho of each token; for gspo its sequence's, with the token's own gradient."""
    if config.objective != "gspo":
        return log_ratio_BT
    tokens_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    of_sequence_B1 = torch.where(mask_BT, log_ratio_BT.detach(), 0.0).sum(dim=1, keepdim=True) / tokens_B1
    return of_sequence_B1 + log_ratio_BT - log_ratio_BT.detach()


def _surrogate(
    ratio_BT: torch.Tensor,
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    config: LossConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return S of each token, and whether its gradient was cut off or, for cispo, its ratio was."""
    low, high = 1 - config.low, 1 + config.high
    plain_BT = ratio_BT * advantages_BT
    if config.objective == "cispo":
        ratio_BT = ratio_BT.detach()
        return ratio_BT.clamp(low, high) * advantages_BT * logprobs_BT, (ratio_BT < low) | (ratio_BT > high)
    if config.objective == "dppo":
        beyond_BT = _binary_divergence(logprobs_BT.detach(), rollout_BT, config) > config.max_divergence
        cut_BT = beyond_BT & (advantages_BT * (logprobs_BT.detach() - rollout_BT) > 0)
        return torch.where(cut_BT, 0.0, plain_BT), cut_BT
    if config.objective == "sapo":
        tau_BT = torch.where(advantages_BT > 0, config.tau_positive, config.tau_negative)
        gate_BT = 4 / tau_BT * torch.sigmoid(tau_BT * (ratio_BT - 1))
        return gate_BT * advantages_BT, torch.zeros_like(gate_BT, dtype=torch.bool)
    clipped_BT = ratio_BT.clamp(low, high) * advantages_BT
    surrogate_BT = torch.minimum(plain_BT, clipped_BT)
    cut_BT = clipped_BT < plain_BT
    if config.objective == "ppo" and config.dual_clip is not None:
        floor_BT = config.dual_clip * advantages_BT
        below_BT = (advantages_BT < 0) & (surrogate_BT < floor_BT)
        surrogate_BT = torch.where(below_BT, floor_BT, surrogate_BT)
        cut_BT = cut_BT | below_BT
    return surrogate_BT, cut_BT


def _binary_divergence(logprobs_BT: torch.Tensor, rollout_BT: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Return the divergence between (mu, 1 - mu) of the rollout and (pi, 1 - pi) of the policy, a token."""
    pi_BT, mu_BT = logprobs_BT.exp(), rollout_BT.exp()
    if config.divergence == "tv":
        return (pi_BT - mu_BT).abs()
    pi_BT, mu_BT = pi_BT.clamp(_SURE_EPSILON, 1 - _SURE_EPSILON), mu_BT.clamp(_SURE_EPSILON, 1 - _SURE_EPSILON)
    return mu_BT * (mu_BT / pi_BT).log() + (1 - mu_BT) * ((1 - mu_BT) / (1 - pi_BT)).log()


def _agreeing(
    mismatch_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor, config: LossConfig
) -> torch.Tensor:
    """Return which tokens are kept, by how much engine and trainer differ in them and in their sequence."""
    kept_BT = torch.ones_like(mask_BT)
    if config.outside == "mask":
        w_BT = mismatch_BT.exp()
        kept_BT = kept_BT & (w_BT >= (config.tis_floor or 0.0))
        if config.tis_cap is not None:
            kept_BT = kept_BT & (w_BT <= config.tis_cap)
    if not config.masks_sequences:
        return kept_BT
    log_product_B1 = torch.where(mask_BT, mismatch_BT, 0.0).sum(dim=1, keepdim=True)
    log_mean_B1 = log_product_B1 / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    if config.sequence_cap is not None:
        kept_BT = kept_BT & (log_product_B1.clamp(max=LOG_RATIO_LIMIT).exp() <= config.sequence_cap)
    if config.geometric_floor is not None:
        kept_BT = kept_BT & (log_mean_B1.exp() >= config.geometric_floor)
    if config.geometric_cap is not None:
        kept_BT = kept_BT & (log_mean_B1.exp() <= config.geometric_cap)
    if config.off_policy_threshold is not None:
        kept_BT = kept_BT & ((advantages_BT >= 0) | (-log_mean_B1 <= config.off_policy_threshold))
    return kept_BT


def _weight(mismatch_BT: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """Return what a token's surrogate is weighted by for the distance between engine and trainer."""
    if config.anchor == "rollout" or (config.tis_cap is None and config.outside == "truncate"):
        return torch.ones_like(mismatch_BT)
    w_BT = mismatch_BT.exp()
    return w_BT if config.tis_cap is None or config.outside == "mask" else w_BT.clamp(max=config.tis_cap)


def _share(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return the weight of each token in the sum: 0 off the mask, and under sequence_mean a share of its sample."""
    share_BT = batch.mask_BT.float()
    sample_tokens_B1 = batch.sample_tokens_B[:, None].clamp(min=1)
    if config.averaging == "sequence_mean":
        share_BT = share_BT / sample_tokens_B1
    if config.sharing == "sequences":
        even_B1 = batch.sample_sequences_B[:, None] * batch.mask_BT.sum(dim=1, keepdim=True)
        share_BT = share_BT * (sample_tokens_B1 / even_B1.clamp(min=1))
    return share_BT


def _mean(total: torch.Tensor, count: float) -> float | None:
    return total.item() / count if count else None
