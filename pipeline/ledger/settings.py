"""The settings of a run's history: all that reading and checking it takes of a run's configuration."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["LedgerSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings:
    """`trainer`: name of the trainer whose ledger it is. `folder`: the run's. `replicas`: of each stream."""

    run: str
    revision: str
    trainer: str
    folder: Path
    replicas: int = 1
