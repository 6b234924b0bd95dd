"""Takes an optimizer step that leaves out groups whose own gradient is not finite."""

from __future__ import annotations

from lachesis.pipeline.trainer.learner import Learner, NonFiniteError
from lachesis.pipeline.trainer.packed_batch import PackedBatch, pack
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.step_metrics import StepMetrics

__all__ = ["step_on_finite_groups"]


def step_on_finite_groups(
    learner: Learner, selected: TrainableBatch, pad_id: int
) -> tuple[TrainableBatch, StepMetrics, PackedBatch]:
    """Take the optimizer step on the selection, without groups whose own gradient is not finite.

    Return the trained selection, the step's metrics and the tensors. Raises `DataError` if nothing can be trained. With
    several ranks each has the sequences of its share, and the `refs` of all.
    """
    packed = _packed(learner, selected, pad_id)
    try:
        return selected, learner.step(packed), packed
    except NonFiniteError:
        unsound = learner.non_finite_groups(packed)
        if not unsound or len(unsound) == len(selected.refs):
            raise
    selected = selected.without(dict.fromkeys(unsound, "its loss or gradient by itself is not finite"))
    packed = _packed(learner, selected, pad_id)
    return selected, learner.step(packed), packed


def _packed(learner: Learner, selected: TrainableBatch, pad_id: int) -> PackedBatch:
    if not selected.sequences and learner.ranks.size > 1:
        return PackedBatch.idle()
    return pack(selected.sequences, pad_id=pad_id)
