"""When a checkpoint is due: at multiples, at the end, and when a report is full."""

import pytest

from lachesis.pipeline.config.run import TrainingConfig
from lachesis.pipeline.trainer.unreported_steps import UnreportedSteps
from lachesis.schemas.ledger import GroupDrops


@pytest.mark.parametrize(
    ("checkpointed", "steps", "due"),
    [
        (0, None, [3, 6, 9]),
        (2, None, [3, 6, 9]),  # a checkpoint in between, of a trainer that waited, moves none of the others
        (3, None, [6, 9]),
        (0, 8, [3, 6, 8]),
    ],
)
def test_checkpoints_are_due_at_multiples_and_at_the_last_step(checkpointed, steps, due):
    training = TrainingConfig(steps=steps, checkpoint_every=3)
    found, unreported = [], UnreportedSteps(checkpointed, 0.0)
    for step in range(checkpointed + 1, (steps or 9) + 1):
        if unreported.is_checkpoint_due(training, step, 1.0):
            found.append(step)
            unreported.checkpointed = step
    assert found == due


def test_a_report_that_has_no_room_for_more_drops_makes_one_due():
    training = TrainingConfig(checkpoint_every=100)
    unreported = UnreportedSteps(0, 0.0)
    unreported.drops = [GroupDrops(batch=0, seqs=list(range(4095)), reason="gone")]
    assert not unreported.is_checkpoint_due(training, 1, 1.0)
    unreported.drops.append(GroupDrops(batch=1, seqs=[5000], reason="gone"))
    assert unreported.is_checkpoint_due(training, 2, 1.0)


def test_one_is_due_after_a_while_that_is_long_beside_the_time_it_takes():
    training = TrainingConfig(checkpoint_every=100, checkpoint_after_s=60.0)
    unreported = UnreportedSteps(3, 1000.0)
    assert not unreported.is_checkpoint_due(training, 4, 1059.0)
    assert unreported.is_checkpoint_due(training, 5, 1060.0)
    assert unreported.hand_over(5, 1061.0).checkpointed == 3
    unreported.took_s = 4.0
    assert not unreported.is_checkpoint_due(training, 6, 1140.0)
    assert unreported.is_checkpoint_due(training, 7, 1141.0)
