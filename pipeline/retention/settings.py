"""The settings of retention: all that trimming, deletion and recovery take of a run's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.pipeline.ledger.settings import LedgerSettings
from lachesis.pipeline.retention.config import RetentionConfig

__all__ = ["HistorySettings", "ReaderSettings", "RecoverySettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Which of the run's services read its history.

    `learned`: the environments with a curriculum. `learns_names`: whether a curriculum learns about the items of an
    environment whose tasks it does not draw.
    """

    environments: Sequence[str]
    learned: Sequence[str]
    learns_names: bool
    has_teacher: bool = False
    has_health: bool = False
    has_webhook: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """What may be deleted of a run's history: `readers` need the rest. `trainer`: the one that the run trains."""

    run: str
    revision: str
    trainer: str
    readers: ReaderSettings
    retention: RetentionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverySettings(LedgerSettings):
    """`trains`: whether the run has a trainer of its own. `has_own_server`: whether its folder holds the streams."""

    environments: Sequence[str]
    trains: bool = True
    has_own_server: bool = True
