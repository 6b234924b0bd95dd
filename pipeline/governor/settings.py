"""The settings of the governor: all that it takes of a run's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.retention.settings import HistorySettings

__all__ = ["GovernorSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GovernorSettings:
    """`flow`, `batching`: the sections of these names. `steps`: after which the run ends, None: it goes on.

    `history`: what may be deleted. `folder`: the run's. `store`: where the run's own server keeps the streams; None: it
    has another server.
    """

    flow: FlowConfig
    batching: BatchingConfig
    environments: Sequence[str]
    trainer: str
    steps: int | None
    history: HistorySettings
    folder: Path
    store: Path | None = None
