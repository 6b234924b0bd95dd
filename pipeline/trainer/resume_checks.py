"""Checks whether a trainer may go on from a checkpoint, or from none. No torch."""

from __future__ import annotations

from pathlib import Path

from lachesis.pipeline.errors import CheckpointError, LedgerError
from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.trainer.feed import BatchFeed

__all__ = ["check_resumable", "refuse_lost"]


def refuse_lost(feed: BatchFeed, folder: Path) -> None:
    """Raise `CheckpointError` where steps were reported as trained but `folder` holds no checkpoint."""
    report = feed.report
    if report is not None:
        raise CheckpointError(
            f"step {report.step} was reported as trained and checkpointed in {report.checkpoint}, but there "
            f"is no checkpoint in {folder}: restore the folder; or, if no checkpoint is left anywhere, "
            f"`lachesis runs recover {report.run} --from-first-model` makes training begin again"
        )


async def check_resumable(state: TrainerState, path: Path, feed: BatchFeed) -> None:
    """Compare the checkpoint at `path` with the ledger and the last report in it.

    Raises `CheckpointError` when the ledger holds a report of a newer step, or of other weights, and `LedgerError` when
    it is not the one, or does not go as far as the one, that the checkpoint was trained on.
    """
    report, folder = feed.report, path.parent
    if report is not None and report.step > state.step:
        raise CheckpointError(
            f"step {report.step} was reported as trained and checkpointed in {report.checkpoint}, but the newest "
            f"checkpoint in {folder} is of step {state.step}; restore the folder, or "
            f"`lachesis runs recover {report.run}` makes the run go on with what is left"
        )
    if report is not None and report.step == state.step and report.policy_version != state.policy_version:
        raise CheckpointError(
            f"{path} holds policy {state.policy_version}, but step {report.step} was reported as "
            f"{report.policy_version}; restore the folder, or "
            f"`lachesis runs recover {report.run}` makes the run go on with what is left"
        )
    try:
        await feed.verify_position(state.position)
    except LedgerError as error:
        raise LedgerError(
            f"{path} was trained on a ledger that is not there: {error}; "
            f"{await feed.describe_known_checkpoint(folder)}; its weights can be kept as `model` of a new run"
        ) from error
