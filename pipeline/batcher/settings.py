"""The settings of the batcher: all that it takes of a run's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig

__all__ = ["BatcherSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherSettings:
    """`batching`, `advantage`: the sections of these names. `ledger`: where the ledger is and whose it is.

    `ends_batched`: whether rollouts end, for their traces, once they are batched, since another project trains on them.
    """

    batching: BatchingConfig
    advantage: AdvantageConfig
    ledger: LedgerSettings
    environments: Sequence[str]
    ends_batched: bool = False
