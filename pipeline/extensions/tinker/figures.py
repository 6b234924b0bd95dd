"""The figures of one step at Tinker, under the names and by the definitions of the trainer here.

Pure, and without torch. All are over the trained tokens, those of the loss masks, also where an advantage is 0. Figures
that Tinker does not report are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tinker
from numpy.typing import NDArray

from lachesis.pipeline.trainer.metrics import TokenFigures
from lachesis.pipeline.trainer.mismatch_by_env import mismatch_by_env, summed_by
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.ledger import Mismatch

__all__ = ["mismatch_of", "sequence_figures", "tinker_figures"]

_LOSS_SUM = "loss:sum"
"""Tinker's name of a loss, summed over all tokens."""


def tinker_figures(
    selected: TrainableBatch,
    forward: tinker.ForwardBackwardOutput,
    optimizer: tinker.OptimStepResponse,
    mismatch: Mismatch,
) -> dict[str, float]:
    """Return the figures of a step that Tinker alone knows. `mismatch`: as `mismatch_of` returns it.

    `train/loss` is the mean over the trained tokens of the batch: of the loss that Tinker reports, or else of
    importance sampling's -w A by the logprobs that it returned.
    """
    tokens = sequence_figures(selected.sequences)
    figures = {
        "train/sequences": float(tokens.sequences),
        "train/tokens": float(tokens.tokens),
        **tokens.figures(),
    }
    loss_sum = forward.metrics.get(_LOSS_SUM)
    known = {
        "train/loss": _loss(selected.sequences, forward) if loss_sum is None else loss_sum / tokens.tokens,
        "train/kl": mismatch.k3,
        "train/ratio_mean": mismatch.ratio,
        "train/effective_sample_size": mismatch.ess,
        "logprobs/diff": mismatch.k1,
        "logprobs/mean_training": None if mismatch.k1 is None else tokens.logprobs - mismatch.k1,
    }
    figures |= {name: value for name, value in known.items() if value is not None}
    return figures | {f"tinker/{name}": value for name, value in (forward.metrics | (optimizer.metrics or {})).items()}


def sequence_figures(sequences: Sequence[TrainingSequence]) -> TokenFigures:
    """Return the figures of the trained tokens of at least one sequence."""
    lengths = [int(one.loss_mask.sum()) for one in sequences]
    logprobs = np.concatenate([one.logprobs[one.loss_mask] for one in sequences]).astype(np.float64)
    advantages = np.concatenate([_advantages(one) for one in sequences])
    mean = float(advantages.mean())
    return TokenFigures(
        tokens=sum(lengths),
        sequences=len(lengths),
        longest=max(lengths),
        logprobs=float(logprobs.mean()),
        advantages=mean,
        squares=float(((advantages - mean) ** 2).sum()),
    )


def mismatch_of(
    sequences: Sequence[TrainingSequence], forward: tinker.ForwardBackwardOutput, envs: Sequence[str]
) -> Mismatch:
    """Return how the logprobs at Tinker's trainer differ from the rollouts', over the trained tokens.

    `envs` names the environment of each sequence.
    """
    names, sums = [], []
    for env, log_w in zip(envs, _log_ratios(sequences, forward), strict=True):
        if log_w is not None:
            names.append(env)
            sums.append(_mismatch_sums(log_w))
    total = mismatch_by_env([summed_by([""] * len(sums), sums)]).get("")
    if total is None:
        return Mismatch(k1=None, k3=None, ratio=None, ess=None)
    return Mismatch(total.k1, total.k3, total.ratio, total.ess, envs=mismatch_by_env([summed_by(names, sums)]))


def _loss(sequences: Sequence[TrainingSequence], forward: tinker.ForwardBackwardOutput) -> float | None:
    """Return the mean of -w A over all trained tokens; None unless Tinker returned a logprob for each."""
    total, tokens = 0.0, 0
    for one, log_w in zip(sequences, _log_ratios(sequences, forward), strict=True):
        if log_w is None:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            total -= float((np.exp(log_w) * _advantages(one)).sum())
        tokens += log_w.size
    return total / tokens if math.isfinite(total) else None


def _log_ratios(
    sequences: Sequence[TrainingSequence], forward: tinker.ForwardBackwardOutput
) -> list[NDArray[np.float64] | None]:
    """Return ln(p_train / p_rollout) of each sequence's trained tokens; None where Tinker did not return them."""
    outputs = [*forward.loss_fn_outputs, *[{}] * len(sequences)][: len(sequences)]
    found: list[NDArray[np.float64] | None] = []
    for one, output in zip(sequences, outputs, strict=True):
        new = output["logprobs"].to_numpy().astype(np.float64) if "logprobs" in output else np.empty(0)
        trained = np.flatnonzero(one.loss_mask) - 1  # a datum's row t is of token t + 1
        found.append(new[trained] - one.logprobs[trained + 1] if trained[-1] < len(new) else None)
    return found


def _advantages(sequence: TrainingSequence) -> NDArray[np.float64]:
    """Return the advantage of each trained token."""
    whole = np.broadcast_to(np.asarray(sequence.advantage, np.float64), sequence.loss_mask.shape)
    return whole[sequence.loss_mask]


def _mismatch_sums(log_w: NDArray[np.float64]) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        w = np.exp(log_w)
        sums = (-log_w.sum(), (w - 1 - log_w).sum(), w.sum(), (w**2).sum())
    return [float(log_w.size), *map(float, sums)]
