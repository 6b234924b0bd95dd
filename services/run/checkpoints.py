"""Finds the newest checkpoint in a run's folder."""

from pathlib import Path

from lachesis.pipeline.training.state import CHECKPOINTS, POINTER

__all__ = ["newest_checkpoint"]


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the folder of the newest checkpoint of the run in `folder`, None where there is none."""
    pointer = folder / CHECKPOINTS / POINTER
    return pointer.with_name(pointer.read_text().strip()) if pointer.is_file() else None
