"""Trains one batch of the ledger: selects this rank's share, takes the step, agrees with all ranks.

Guarantees that all ranks train the same batch or none of it: what is dropped, and why, is agreed before the step.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import msgspec

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.model.device import Determinism, take_repeatably
from lachesis.pipeline.trainer.collectives import Ranks, raise_rank_lost
from lachesis.pipeline.trainer.feed import LedgerBatch
from lachesis.pipeline.trainer.finite_step import step_on_finite_groups
from lachesis.pipeline.trainer.gather import gather_weights
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.metrics import TokenFigures, token_figures
from lachesis.pipeline.trainer.mismatch_by_env import mismatch_by_env, summed_by
from lachesis.pipeline.trainer.sequences import TrainableBatch, select_trainable
from lachesis.pipeline.trainer.step_metrics import StepMetrics
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import EnvMismatch

__all__ = ["TrainedBatch", "train_batch"]

log = logging.getLogger("lachesis")


class TrainedBatch(NamedTuple):
    """`batch` knows what other ranks fetched of it. `selected`: its `refs` and drops are those of all ranks. `envs`:
    how far the logprobs of each environment's tokens, on all ranks, are from the rollouts'."""

    batch: LedgerBatch
    selected: TrainableBatch
    metrics: StepMetrics
    tokens: TokenFigures
    envs: dict[str, EnvMismatch]


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report on its share: groups dropped, by sequence in ROLLOUTS, and facts of the others by group."""

    dropped: dict[int, str]
    started_ns: dict[str, int]
    policy_versions: dict[str, str]
    sequences: int


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's figures of its tokens; `envs`: by environment, see `mismatch_sums`. NaN travels as null."""

    tokens: TokenFigures
    envs: Mapping[str, Sequence[float | None]]


def train_batch(
    learner: Learner,
    batch: LedgerBatch,
    limits: TrainerLimits,
    *,
    pad_id: int,
    shuffle_seed: int | None,
    deterministic: Determinism = "auto",
) -> TrainedBatch:
    """Take the optimizer step on what can be used of the batch. A collective.

    `batch` has the payloads of this rank's share. `deterministic`: see `training.deterministic`.

    Raises `DataError` on all ranks where nothing can be used, `RankLostError` where another rank has gone, and
    `ConfigError` where the step must be repeatable and cannot be on this device.
    """
    with raise_rank_lost(learner.ranks):
        unfetched = {seq: str(error) for seq, error in batch.unfetched.items()}
        own = select_trainable(
            batch.groups, limits, inputs=learner.inputs, unfetched=unfetched, shuffle_seed=shuffle_seed
        )
        batch, selected = _agree(learner.ranks, batch, own)
        # Ranks that repeat a step would repeat collectives that others, with nothing to train, do not.
        repeatable = deterministic if learner.ranks.size == 1 else "always"
        step = partial(step_on_finite_groups, learner, selected, pad_id)
        selected, metrics, packed = take_repeatably(step, repeatable, log.warning)
        env_of = {ref.group: ref.env for ref in selected.refs}
        own_envs = summed_by((env_of[group] for group in metrics.mismatches), metrics.mismatches.values())
        gathered = learner.ranks.gather(msgspec.json.encode(_Figures(tokens=token_figures(packed), envs=own_envs)))
        gather_weights(learner)
    figures = [msgspec.json.decode(each, type=_Figures) for each in gathered]
    envs = mismatch_by_env([each.envs for each in figures])
    return TrainedBatch(batch, selected, metrics, TokenFigures.merged([each.tokens for each in figures]), envs)


def _agree(ranks: Ranks, batch: LedgerBatch, own: TrainableBatch) -> tuple[LedgerBatch, TrainableBatch]:
    share = _Share(
        dropped=own.dropped,
        started_ns=batch.started_ns,
        policy_versions=batch.policy_versions,
        sequences=len(own.sequences),
    )
    shares = [msgspec.json.decode(each, type=_Share) for each in ranks.gather(msgspec.json.encode(share))]
    dropped = {seq: reason for each in shares for seq, reason in each.dropped.items()}
    if not any(each.sequences for each in shares):
        first = next((dropped[ref.seq] for ref in batch.batch.groups if ref.seq in dropped), "")
        raise DataError(f"none of the batch's {len(batch.batch.groups)} groups can be trained; the first: {first}")
    batch = replace(
        batch,
        started_elsewhere_ns={group: at for each in shares for group, at in each.started_ns.items()},
        versions_elsewhere={group: version for each in shares for group, version in each.policy_versions.items()},
    )
    refs = [ref for ref in batch.batch.groups if ref.seq not in dropped]
    return batch, TrainableBatch(refs, own.sequences, dropped)
