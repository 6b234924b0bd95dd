"""Writes a checkpoint of a learner at once, as the trainer does step by step."""

from pathlib import Path
from typing import Any

from lachesis.pipeline.ledger.checkpoint_state import TrainerState
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import policy_version
from lachesis.pipeline.trainer.checkpoint import CheckpointContent
from lachesis.pipeline.trainer.checkpoint_folder import write_checkpoint
from lachesis.pipeline.trainer.learner import Learner


def save_checkpoint(
    folder: str | Path,
    policy: PolicyModel,
    learner: Learner,
    *,
    lineage: str,
    keep: int = 3,
    every: int = 1,
    **state: Any,
) -> TrainerState:
    """Write a checkpoint of `learner`, whose model is the policy's, and make it the latest.

    `state`: the other fields of the `TrainerState`, which is returned.
    """
    content = CheckpointContent.of(policy, learner)
    version = policy_version(content.step, lineage, content.weights)
    recorded = TrainerState(step=content.step, lineage=lineage, policy_version=str(version), **state)
    write_checkpoint(Path(folder), recorded, content.write, keep=keep, every=every)
    return recorded
