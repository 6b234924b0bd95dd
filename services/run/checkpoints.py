"""Finds checkpoints in a run's folder: the newest, the best, or that of a step."""

from pathlib import Path

from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import (
    CHECKPOINTS,
    best_checkpoint,
    known_checkpoints,
    latest_checkpoint,
)
from lachesis.schemas.errors import ConfigError

__all__ = ["find_checkpoint", "names_checkpoint", "newest_checkpoint"]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint; None if there is none or the pointer is unreadable."""
    try:
        return latest_checkpoint(folder / CHECKPOINTS)
    except CheckpointError:
        return None


def names_checkpoint(name: str) -> bool:
    """Whether `name` is `best`, `newest` or a step, and so means a checkpoint of a run."""
    return name in {"best", "newest"} or (name.isascii() and name.isdecimal())


def find_checkpoint(folder: Path, name: str) -> Path:
    """Return the checkpoint `best`, `newest` or of a step in a run's folder.

    Raises `ConfigError` when there is none, `CheckpointError` when the pointer to the newest is broken.
    """
    place = folder / CHECKPOINTS
    if name == "newest":
        found = latest_checkpoint(place)
        if found is None:
            raise ConfigError(f"{place} has no checkpoint yet")
        return found
    if name == "best":
        found = best_checkpoint(place)
        if found is None:
            raise ConfigError(
                f"{place} has no best checkpoint: no held-out rate is known yet, or the model that training began with "
                "is the best; take `newest` or a step"
            )
        return found
    kept = {state.step: path for path, state in known_checkpoints(place)}
    if not name.isdecimal() or int(name) not in kept:
        there = f"there are {', '.join(map(str, sorted(kept)))}" if kept else "there is none"
        raise ConfigError(f"no checkpoint of step {name} in {place}; {there}")
    return kept[int(name)]
