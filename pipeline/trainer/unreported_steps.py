"""Records a trainer's steps since its last report, for the next checkpoint and report."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.config import TrainingConfig
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.pipeline.trainer.mismatch_by_env import bounded_mismatches
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.train_loop import publish_with_retries
from lachesis.schemas.ledger import GroupDrops, Mismatch, StepTimes, VoidBatch

__all__ = ["UnreportedSteps"]

log = logging.getLogger("lachesis")

_MAX_DROPS_PER_REPORT = 4096
"""Dropped groups from which on a checkpoint is due at once, so that a report, which lists them, stays below 1 MiB."""
_MAX_DROPS_LOGGED = 5
_TIMES_AS_LONG = 20
"""A checkpoint that `checkpoint_after_s` asks for comes after so many times the seconds that the last one took."""


@dataclass(slots=True)
class UnreportedSteps:
    """The steps since the newest checkpoint, which holds `checkpointed` optimizer steps.

    It was begun at `began_s` on a clock that does not jump, and `took_s` until it was reported. `dropped` counts groups
    since this trainer started.
    """

    checkpointed: int
    began_s: float
    took_s: float = 0.0
    voids: list[VoidBatch] = field(default_factory=list)
    drops: list[GroupDrops] = field(default_factory=list)
    times: list[StepTimes] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    dropped: int = 0

    def record_void(self, number: int, reason: str) -> None:
        """Batch `number` could not be trained."""
        log.warning("batch %d is void: %s", number, reason)
        self.voids.append(VoidBatch(number, reason))

    def record_drops(self, number: int, selected: TrainableBatch) -> None:
        """Batch `number` is trained on what was `selected` of it."""
        drops = selected.drops(number)
        for drop in drops:
            log.warning(
                "batch %d is trained without %d of its groups, at %s of ROLLOUTS: %s",
                number, len(drop.seqs), ", ".join(map(str, drop.seqs[:_MAX_DROPS_LOGGED])), drop.reason,
            )  # fmt: skip
        self.drops += drops
        self.dropped += len(selected.dropped)

    def is_checkpoint_due(self, training: TrainingConfig, step: int, now_s: float) -> bool:
        """Whether optimizer step `step`, which ended at `now_s`, is to be followed by a checkpoint.

        At the multiples of `checkpoint_every`, also after a checkpoint between two of them; where the last one is too
        long ago; at the last step; and when a report has no room for more drops.
        """
        every, after_s = training.checkpoint_every, max(training.checkpoint_after_s, _TIMES_AS_LONG * self.took_s)
        return (
            step // every > self.checkpointed // every
            or now_s - self.began_s >= after_s
            or (training.steps is not None and step >= training.steps)
            or sum(len(each.seqs) for each in self.drops) >= _MAX_DROPS_PER_REPORT
        )

    def hand_over(self, step: int, now_s: float) -> UnreportedSteps:
        """Return the steps up to `step`, for a checkpoint that holds them, and go on without them."""
        steps = replace(self)
        self.checkpointed, self.began_s = step, now_s
        self.voids, self.drops, self.times, self.mismatches = [], [], [], []
        return steps

    async def report(
        self, service: Service, drain_s: float, feed: BatchFeed, state: TrainerState, checkpoint: Path | None
    ) -> None:
        """Report a checkpoint that is on disk. `drain_s`: seconds left for it once the service is to end."""
        report = partial(
            feed.report_trained,
            position=state.position,
            policy_version=state.policy_version,
            step=state.step,
            lineage=state.lineage,
            checkpoint=str(checkpoint),
            voids=self.voids,
            drops=self.drops,
            steps=self.times,
            mismatches=bounded_mismatches(self.mismatches),
            numerics=state.numerics,  # of who took the steps, not of who reports them
        )
        await publish_with_retries(service, drain_s, "report what was trained", report)
        self.voids, self.drops, self.times, self.mismatches = [], [], [], []
