"""Defines a trainer's back end: what computes steps, holds weights, and makes them durable. No torch.

The stage drives it: it reads the ledger, decides what follows what, writes checkpoints and reports. A back end knows
neither; it gets one call at a time, and awaits in it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.trainer.feed import BatchFeed, LedgerBatch
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.ledger import Mismatch, Numerics

__all__ = ["BatchRefusedError", "SavedStep", "TrainedStep", "TrainerBackend"]


class BatchRefusedError(DataError):
    """Raised when a back end refuses a batch for its content, and does not know whether the step was taken.

    The stage restores the newest checkpoint then, and the batch is void.
    """


class TrainedStep(NamedTuple):
    """A step that was taken. `batch`: with what all ranks know of it. `selected`: what of it was trained, of all ranks.

    `figures`: those that only the back end knows. `save_now`: whether the step does not wait for the next checkpoint to
    be reported.
    """

    batch: LedgerBatch
    selected: TrainableBatch
    figures: dict[str, float]
    mismatch: Mismatch
    save_now: bool = False


@dataclass(frozen=True, slots=True)
class SavedStep:
    """What makes a step durable, beside the state that the stage records. No later step changes it.

    `version` and `write`, which gets the folder of the checkpoint, are called in a thread. `nbytes`: about what it
    takes on disk. `numerics`: how the steps were computed.
    """

    nbytes: int
    version: Callable[[], PolicyVersion]
    write: Callable[[Path], None]
    numerics: Numerics | None = None


class TrainerBackend(Protocol):
    """A trainer without its ledger. `restore` comes first, and may come again."""

    name: str
    """What errors and the log call it."""

    async def restore(self, feed: BatchFeed, lineage: str, checkpoint: tuple[Path, TrainerState] | None) -> None:
        """Load a checkpoint that is whole and that the ledger knows; None: begin at step 0.

        `feed` is where policies are published, under versions of `lineage`. Raises `CheckpointError` where the
        checkpoint is none of this back end's or does not go with its settings.
        """

    async def step(self, batch: LedgerBatch) -> TrainedStep:
        """Take the optimizer step on what can be used of the batch.

        Raises `DataError` where nothing can be used: the batch is void, and its step is counted all the same. Raises
        `BatchRefusedError` where the batch was refused: the stage never gives it to the back end again, and counts its
        step.
        """

    def publishing(self) -> AbstractAsyncContextManager[None]:
        """Hold what publishing takes. An offline trainer publishes nothing, and never enters it."""

    async def publish(self, step: int) -> None:
        """Make the weights after `step` steps the run's policy; return as soon as they may change again."""

    async def finish(self) -> None:
        """Wait until the newest weights are published."""

    async def save(self, step: int) -> SavedStep:
        """Return what makes the present weights, those after `step` steps, durable."""

    async def clean_up(self) -> None:
        """Remove what earlier checkpoints needed and none names any more; a newer one is reported."""
