"""Finds the newest checkpoint in a run's folder."""

from pathlib import Path

from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint
from lachesis.schemas.errors import CheckpointError

__all__ = ["newest_checkpoint"]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint; None if there is none or the pointer is unreadable."""
    try:
        return latest_checkpoint(folder / CHECKPOINTS)
    except CheckpointError:
        return None
