"""One batch of the ledger trained: this rank's share selected, the step, what all ranks found.

Guarantees that all ranks train the same batch or none of it: what is dropped, and why, is agreed before the step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec

from lachesis.pipeline.model.device import naming_nondeterminism
from lachesis.pipeline.trainability import TrainerLimits
from lachesis.pipeline.training.feed import LedgerBatch
from lachesis.pipeline.training.learner import Learner, StepMetrics, train_soundly
from lachesis.pipeline.training.metrics import TokenFigures, token_figures
from lachesis.pipeline.training.ranks.collectives import Ranks, told_as_lost_rank
from lachesis.pipeline.training.ranks.gather import gather_weights
from lachesis.pipeline.training.sequences import TrainableBatch, select_trainable
from lachesis.schemas.errors import DataError

__all__ = ["TrainedBatch", "train_batch"]


class TrainedBatch(NamedTuple):
    """`batch` knows what other ranks fetched of it. `selected`: its `refs` and drops are those of all ranks."""

    batch: LedgerBatch
    selected: TrainableBatch
    metrics: StepMetrics
    tokens: TokenFigures


class _Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank says of its share: groups dropped, by sequence in ROLLOUTS, and facts of the others by group."""

    dropped: dict[int, str]
    started_ns: dict[str, int]
    policy_versions: dict[str, str]
    sequences: int


def train_batch(
    learner: Learner, batch: LedgerBatch, limits: TrainerLimits, *, pad_id: int, shuffle_seed: int | None
) -> TrainedBatch:
    """Take the optimizer step on what can be used of the batch. A collective.

    `batch` has the payloads of this rank's share.

    Raises `DataError` on all ranks where nothing can be used, `RankLostError` where another rank has gone, and
    `ConfigError` where the model has no deterministic form on this device.
    """
    with told_as_lost_rank(learner.ranks):
        unfetched = {seq: str(error) for seq, error in batch.unfetched.items()}
        own = select_trainable(
            batch.groups, limits, inputs=learner.inputs, unfetched=unfetched, shuffle_seed=shuffle_seed
        )
        batch, selected = _agree(learner.ranks, batch, own)
        with naming_nondeterminism():
            selected, metrics, packed = train_soundly(learner, selected, pad_id)
        tokens = learner.ranks.gather(msgspec.json.encode(token_figures(packed)))
        gather_weights(learner)
    figures = [msgspec.json.decode(each, type=TokenFigures) for each in tokens]
    return TrainedBatch(batch, selected, metrics, TokenFigures.merged(figures))


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
