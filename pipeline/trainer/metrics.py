"""The figures of one optimizer step, under the names that logs, plots and wandb share.

Pure: no clock, no I/O.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.ledger.offline_start import OfflineStart
from lachesis.pipeline.trainer.mismatch_by_env import env_figures
from lachesis.pipeline.trainer.rolling_stats import BatchTimings, durations
from lachesis.schemas.ledger import EnvMismatch, GroupRef, Mismatch

if TYPE_CHECKING:  # torch, which a trainer elsewhere does without
    from lachesis.pipeline.trainer.packed_batch import PackedBatch
    from lachesis.pipeline.trainer.step_metrics import StepMetrics

__all__ = [
    "TokenFigures",
    "batch_figures",
    "latencies",
    "mismatch_of",
    "reward_figures",
    "step_figures",
    "token_figures",
]

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def batch_figures(
    groups: Sequence[GroupRef],
    envs: Mapping[str, EnvMismatch],
    number: int,
    *,
    step_of: Callable[[GroupRef], int],
    offline: OfflineStart | None = None,
) -> dict[str, float]:
    """Return the figures of a batch's trained groups, whatever trained them.

    They are `train/step`, `reward/*`, `staleness/*`, and those of `env_figures`. `number`: the batch's. Staleness is in
    optimizer steps, counted from `step_of` a group (`batching.staleness_of`); `offline` counts it for an offline
    trainer.
    """
    staleness = [
        number - step_of(ref) if offline is None else offline.staleness(number, ref.policy_step) for ref in groups
    ]
    return {
        "train/step": float(number + 1),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(max(staleness)),
        **reward_figures(groups),
        **env_figures(envs),
    }


def step_figures(step: StepMetrics, tokens: TokenFigures) -> dict[str, float]:
    """Return the figures of one optimizer step by torch.

    They are `train/*`, `advantages/*`, `logprobs/*`, `tokens/*` and `teacher/*`. Lengths and probabilities are over
    trainable tokens; figures without a value are left out.
    """
    figures = {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/entropy": step.entropy,
        "train/kl": step.kl,
        "train/clip_fraction": step.clip_fraction,
        "train/masked_fraction": step.masked_fraction,
        "train/padding": step.padding,
        "train/shared": step.shared,
        "train/learning_rate": step.learning_rate,
        "train/ratio_mean": step.ratio_mean,
        "train/effective_sample_size": step.effective_sample_size,
        "train/seconds": step.seconds,
        "train/sequences": float(step.sequences),
        "train/tokens": float(step.tokens),
        "train/microbatch_tokens": float(step.microbatch_tokens),
        "logprobs/mean_training": tokens.logprobs - step.kl_k1,
        "logprobs/diff": step.kl_k1,
        **tokens.figures(),
    }
    if step.step_kl is not None:
        figures |= {"train/step_kl": step.step_kl, "train/step_share": step.step_share}
    if step.teacher_kl_k1 is not None:
        figures["teacher/kl"] = step.teacher_kl_k1
    if step.teacher_kl_topk is not None:
        figures["teacher/kl_topk"] = step.teacher_kl_topk
    if step.reference_kl is not None:
        figures["train/reference_kl"] = step.reference_kl
    return figures


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the trainable tokens of a batch, or of one rank's share."""

    tokens: int
    sequences: int
    longest: int
    """Most trainable tokens of a sequence."""
    logprobs: float
    """Mean logprob of the rollout, nats."""
    advantages: float
    """Mean advantage."""
    squares: float
    """Sum of the squared mismatches from that mean."""

    def figures(self) -> dict[str, float]:
        """Return them under the names by which they are logged."""
        return {
            "logprobs/mean": self.logprobs,
            "advantages/mean": self.advantages,
            "advantages/std": math.sqrt(self.squares / self.tokens),
            "tokens/response_length/mean": self.tokens / self.sequences,
            "tokens/response_length/max": float(self.longest),
        }

    @classmethod
    def merged(cls, shares: Sequence[TokenFigures]) -> TokenFigures:
        """Return those of all shares together (Chan's rule); of one share the same."""
        if len(shares) == 1:
            return shares[0]
        tokens = sum(share.tokens for share in shares)
        mean = sum(share.tokens * share.advantages for share in shares) / tokens
        return cls(
            tokens=tokens,
            sequences=sum(share.sequences for share in shares),
            longest=max(share.longest for share in shares),
            logprobs=sum(share.tokens * share.logprobs for share in shares) / tokens,
            advantages=mean,
            squares=sum(share.squares + share.tokens * (share.advantages - mean) ** 2 for share in shares),
        )


def token_figures(batch: PackedBatch) -> TokenFigures:
    """Return the figures of a packed batch; all 0 of one without trainable tokens."""
    trainable = batch.mask_BT.numpy()
    advantages = batch.advantages_BT.numpy()[trainable].astype(np.float64)  # their squares outgrow float32
    lengths = trainable.sum(1)
    found = advantages.size > 0
    return TokenFigures(
        tokens=int(lengths.sum()),
        sequences=batch.sequences,
        longest=int(lengths.max()),
        logprobs=float(batch.logprobs_BT.numpy()[trainable].mean()) if found else 0.0,
        advantages=float(advantages.mean()) if found else 0.0,
        squares=float(((advantages - advantages.mean()) ** 2).sum()) if found else 0.0,
    )


def reward_figures(groups: Sequence[GroupRef]) -> dict[str, float]:
    """Return the mean scores of a batch: `reward/mean`, and by environment `reward/{env}/mean`.

    Groups without a score are left out.
    """
    scores = [(ref.env, ref.score) for ref in groups if ref.score is not None]
    means = {"reward/mean": finite_mean([score for _, score in scores])}
    for env in sorted({env for env, _ in scores}):
        means[f"reward/{env}/mean"] = finite_mean([score for own, score in scores if own == env])
    return {name: mean for name, mean in means.items() if mean is not None}


def mismatch_of(step: StepMetrics, envs: dict[str, EnvMismatch]) -> Mismatch:
    """Return how the logprobs of rollout and training differ, and how far the step went, for the report."""
    values = (step.kl_k1, step.kl, step.ratio_mean, step.effective_sample_size, step.step_kl, step.entropy)
    k1, k3, ratio, ess, step_kl, entropy = (v if v is not None and math.isfinite(v) else None for v in values)
    return Mismatch(k1, k3, ratio, ess, step_kl, entropy, envs)


def latencies(batch: BatchTimings) -> dict[str, float]:
    """Return exact p50, p95, p99 in seconds over a batch's groups.

    Wait and process time by stage, and end to end.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for name, seconds in durations(batch):
        found[name].append(seconds)
    return {
        f"{name}/{label}": float(np.quantile(values, q))
        for name, values in found.items()
        for label, q in _QUANTILES.items()
    }
