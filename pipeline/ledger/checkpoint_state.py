"""The recorded state of checkpoints, and pointers to the newest and the best. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from lachesis.pipeline.common.fsync import fsync, replace_file
from lachesis.pipeline.common.small_files import read_small_file, read_small_text
from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import GroupDrops, Numerics, VoidBatch
from lachesis.schemas.values import Count, from_json

__all__ = [
    "BEST",
    "CHECKPOINTS",
    "PARTIAL",
    "POINTER",
    "STATE",
    "TrainerState",
    "best_checkpoint",
    "known_checkpoints",
    "latest_checkpoint",
    "state_of",
    "write_pointer",
]

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run's folder."""
POINTER, STATE = "latest", "trainer.json"
BEST = "best"
"""The pointer to the checkpoint of the best held-out rate."""
PARTIAL = ".partial-"
"""Prefix of the names of checkpoints that are still being written."""
_NAME = re.compile(r"step-[\w.-]{1,80}", re.ASCII)


class TrainerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of a checkpoint, without its tensors."""

    step: Count
    """Optimizer steps taken."""
    lineage: str
    """The training attempt these weights belong to."""
    policy_version: str
    """Name of the weights, `<step>-<lineage>-<digest>`."""
    ledger_position: Count
    """Ledger entries consumed: those with batches that are in the weights, and those without a batch between them."""
    chain_hash: str
    """Digest of the last of them; 64 zeros before the first."""
    unreported: list[Count] = []
    """Indexes of batches that are in the weights but not yet reported as trained, ascending."""
    voids: list[VoidBatch] = []
    """The unreported batches that could not be trained."""
    drops: list[GroupDrops] = []
    """The groups that were left out of the other unreported batches, and why."""
    numerics: Numerics | None = None
    """How the trainer computed the steps since its start; None: not recorded."""

    @property
    def position(self) -> LedgerPosition:
        """Where in the ledger training goes on."""
        return LedgerPosition(self.ledger_position, self.chain_hash)


def state_of(path: Path) -> TrainerState | None:
    """Return the state that the checkpoint folder `path` records; None if it cannot be loaded."""
    try:
        return from_json(STATE, TrainerState, read_small_file(path / STATE))
    except (OSError, SchemaError):
        return None


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint of `folder`, or None when nothing was ever completed there.

    Raises CheckpointError when the pointer names a folder that is gone.
    """
    folder = Path(folder)
    try:
        name = read_small_text(folder / POINTER).strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{folder / POINTER}: {error.strerror}") from error
    path = folder / name
    if not _NAME.fullmatch(name) or not path.is_dir():
        shown = repr(name) if _NAME.fullmatch(name) else "something"  # it may be a link to any file
        raise CheckpointError(
            f"{folder / POINTER} names {shown}, which is not there. Restore it, or `lachesis runs recover` makes the "
            "run go on from the newest checkpoint that is there"
        )
    return path


def best_checkpoint(folder: str | Path) -> Path | None:
    """Return the checkpoint of the best held-out rate.

    Return None if no rate is known, or if the starting model is the best.
    """
    folder = Path(folder)
    try:
        name = read_small_text(folder / BEST).strip()
    except OSError:
        return None
    path = folder / name
    return path if _NAME.fullmatch(name) and path.is_dir() else None


def write_pointer(folder: Path, pointer: str, name: str) -> None:
    """Write the checkpoint's `name` into the file `pointer` of `folder`.

    After a crash the file has either the old or the new content.
    """
    replace_file(folder / pointer, f"{name}\n".encode())
    fsync(folder)


def known_checkpoints(folder: Path) -> list[tuple[Path, TrainerState]]:
    """Return the complete checkpoints of `folder` with the state that each records, the newest step first."""
    found = [(path, state) for path in folder.glob("step-*") if (state := state_of(path)) is not None]
    return sorted(found, key=lambda pair: pair[1].step, reverse=True)
