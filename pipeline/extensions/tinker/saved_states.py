"""Records the states that a run has saved at Tinker, so that none outlives its checkpoint.

The record is a file beside the checkpoints.

Guarantees that a state is on record before a checkpoint names it, and is forgotten only once Tinker has deleted it. A
deletion that fails is tried again at the next checkpoint. A trainer that is killed between Tinker's answer and the
record leaves one state that is on no record.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import known_checkpoints
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json

__all__ = [
    "TINKER_STATE",
    "TinkerState",
    "needed_states",
    "read_saved_states",
    "read_tinker_state",
    "record_state",
    "write_saved_states",
]

TINKER_STATE = "tinker.json"
_RECORD = "tinker_states.json"


class TinkerState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's state at Tinker."""

    state: str
    """Path of weights and optimizer, tinker://..."""
    base_model: str
    rank: int


def needed_states(folder: Path) -> set[str]:
    """Return the states that the checkpoints in `folder` name."""
    return {read_tinker_state(path).state for path, _ in known_checkpoints(folder)}


def read_tinker_state(path: Path) -> TinkerState:
    """Return a checkpoint's state at Tinker. Raises `CheckpointError` where that cannot be read."""
    try:
        return from_json(TINKER_STATE, TinkerState, read_small_file(path / TINKER_STATE))
    except FileNotFoundError as error:
        raise CheckpointError(
            f'checkpoint {path} is none of a trainer at Tinker: set training.backend = "torch", or start a new run'
        ) from error
    except (OSError, SchemaError) as error:
        raise CheckpointError(f"checkpoint {path} cannot be loaded: {error}") from error


def record_state(folder: Path, state: str) -> None:
    """Put a state on record that was just saved."""
    write_saved_states(folder, {state} | read_saved_states(folder))


def read_saved_states(folder: Path) -> set[str]:
    """Return the states on record. Raises `CheckpointError` where the record cannot be read."""
    try:
        return set(from_json(_RECORD, list[str], read_small_file(folder / _RECORD)))
    except FileNotFoundError:
        return set()
    except (OSError, SchemaError) as error:
        raise CheckpointError(
            f"{folder / _RECORD} cannot be read: {error}; remove it, and delete at Tinker by hand what it named"
        ) from error


def write_saved_states(folder: Path, states: set[str]) -> None:
    """Put the record into the place of the former one."""
    replace_file(folder / _RECORD, msgspec.json.format(msgspec.json.encode(sorted(states))))
