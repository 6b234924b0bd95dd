"""The figures of a step at Tinker: the same names and definitions as those of the trainer here."""

import numpy as np
import pytest

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.trainer.metrics import batch_figures, token_figures
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import TrainableBatch
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.ledger import GroupRef

tinker = pytest.importorskip("tinker", reason="the extra `tinker` is not installed")

from lachesis.pipeline.extensions.tinker.figures import (  # noqa: E402
    mismatch_of,
    sequence_figures,
    tinker_figures,
)

SEED_NAMES = {
    *("train/loss", "train/learning_rate", "reward/mean", "logprobs/mean", "logprobs/mean_training", "logprobs/diff"),
    *("advantages/mean", "advantages/std"),
}


def sequence(mask, logprobs, advantage, group="g"):
    column = np.full(len(mask), np.nan, np.float32)
    column[np.array(mask, bool)] = logprobs
    return TrainingSequence(
        tokens=np.arange(len(mask), dtype=np.int32),
        loss_mask=np.array(mask, bool),
        logprobs=column,
        advantage=advantage,
        group_id=group,
    )


SEQUENCES = [
    sequence([0, 1, 1, 0], [-1.0, -2.0], 1.0),
    sequence([0, 0, 1, 0, 1], [-3.0, -5.0], 0.0),  # at the mean of its group
    sequence([0, 1], [-4.0], np.array([7.0, -2.0], np.float32), group="h"),
]
NEW = [[-1.5, -1.0], [0.0, -3.0, 0.0, -5.5], [-4.0]]
"""What Tinker returns: a value for each row of a datum, which ends at the last trained token."""


def forward(rows=NEW, metrics=None):
    outputs = [{"logprobs": tinker.TensorData.from_numpy(np.array(row, np.float32))} for row in rows]
    return tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics={} if metrics is None else metrics
    )


def ref(group, env, score):
    return GroupRef(
        seq=1, group=group, env=env, policy_step=2, sequences=2, tokens=4, advantages=[1.0, 0.0], score=score
    )


def figures(answer):
    selected = TrainableBatch([ref("g", "sums", 0.5), ref("h", "words", 1.0)], SEQUENCES, {})
    mismatch = mismatch_of(SEQUENCES, answer, ["sums", "sums", "words"])
    own = tinker_figures(selected, answer, tinker.OptimStepResponse(), mismatch)
    return own | batch_figures(selected.refs, mismatch.envs or {}, 3, step_of=BatchingConfig().step_of)


def test_the_figures_by_hand():
    found = figures(forward())
    assert found.keys() >= SEED_NAMES - {"train/learning_rate"}  # the stage knows that one
    log_w = np.array([-0.5, 1.0, 0.0, -0.5, 0.0])
    advantages = np.array([1.0, 1.0, 0.0, 0.0, -2.0])
    assert found["train/loss"] == pytest.approx(-(np.exp(log_w) * advantages).mean())
    assert found["logprobs/mean"] == pytest.approx(-3.0)
    assert found["logprobs/mean_training"] == pytest.approx(-3.0)
    assert found["logprobs/diff"] == pytest.approx(-log_w.mean(), abs=1e-7)
    assert found["train/ratio_mean"] == pytest.approx(np.exp(log_w).mean())
    assert found["advantages/mean"] == pytest.approx(0.0)
    assert found["advantages/std"] == pytest.approx(advantages.std())
    assert found["reward/mean"] == pytest.approx(0.75)
    assert found["train/tokens"] == 5
    assert found["logprobs/words/diff"] == pytest.approx(0.0)
    assert (found["train/step"], found["staleness/mean"]) == (4, 1)


def test_the_loss_that_tinker_tells_is_the_mean_over_the_trained_tokens():
    assert figures(forward(metrics={"loss:sum": 12.5}))["train/loss"] == pytest.approx(2.5)


def test_what_tinker_does_not_tell_is_left_out():
    found = figures(tinker.ForwardBackwardOutput(loss_fn_output_type="none", loss_fn_outputs=[], metrics={}))
    assert not found.keys() & {"train/loss", "logprobs/diff", "logprobs/mean_training"}
    assert found["logprobs/mean"] == pytest.approx(-3.0)
    cut = figures(forward([NEW[0], NEW[1][:2], NEW[2]]))
    assert "train/loss" not in cut, "one sequence has too few logprobs"
    assert cut["logprobs/sums/diff"] == pytest.approx(-0.25)


def test_they_are_those_of_the_trainer_here():
    packed = pack(SEQUENCES)
    here, there = token_figures(packed), sequence_figures(SEQUENCES)
    assert (here.tokens, here.sequences, here.longest) == (there.tokens, there.sequences, there.longest)
    for name in ("logprobs", "advantages", "squares"):
        assert getattr(here, name) == pytest.approx(getattr(there, name), rel=1e-6), name
