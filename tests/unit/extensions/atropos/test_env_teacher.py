"""The teacher that an environment of Atropos queried itself (`distill_*`) changes the gradient."""

import numpy as np
import pytest

from lachesis.pipeline.common.trainability import TrainerLimits
from lachesis.pipeline.extensions.atropos.logic.scored_data import ScoredData
from lachesis.pipeline.extensions.atropos.logic.scored_groups import GroupOrigin, to_group
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.sequences import training_sequences
from lachesis.schemas.annotations import TeacherLogprobs
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import GroupRef

pytestmark = pytest.mark.outside

LIMITS = TrainerLimits()
TOKENS = [[5, 6, 7, 8], [5, 6, 9, 10]]


def group(*, distilled: bool = True):
    ids = [[[], *([token, 3] for token in row[1:-1]), [3]] for row in TOKENS]  # the last token is no alternative
    logprobs = [[[], *([-0.25, -9.0] for _ in row[1:-1]), [-9.0]] for row in TOKENS]
    data = ScoredData(
        tokens=TOKENS,
        masks=[[-100, *row[1:]] for row in TOKENS],
        scores=[1.0, 0.0],
        inference_logprobs=[[1.0, -1.0, -1.0, -1.0]] * 2,
        distill_token_ids=ids if distilled else None,
        distill_logprobs=logprobs if distilled else None,
    )
    origin = GroupOrigin(
        id="0" * 32, run="r", env="words", producer="p", epoch=0, counter=0, policy_version="0-a-b",
        tokenizer_hash="t", started_ns=0, name="words", longest=9, most=9, limits=LIMITS,
    )  # fmt: skip
    return to_group(data, origin)


def policy():
    return build_tiny_policy(0, width=32, layers=2, max_length=48)


def reference():
    return GroupRef(seq=1, group="0" * 32, env="words", advantages=[1.0, -1.0], sequences=2, tokens=8, policy_step=0)


def weights_after(made, teacher_coef):
    model = policy().model
    learner = Learner(model, LearnerConfig(learning_rate=1e-2, loss=LossConfig(teacher_coef=teacher_coef)))
    step = learner.step(pack(training_sequences(reference(), made, None, LIMITS)))
    return weights_digest(policy_tensors(model)), step


def test_it_changes_the_weights_if_it_has_a_weight():
    with_it, step = weights_after(group(), 0.5)
    without, alone = weights_after(group(distilled=False), 0.5)
    assert with_it != without
    assert step.teacher_kl_k1 is not None
    assert alone.teacher_kl_k1 is None
    assert weights_after(group(), 0.0)[0] == weights_after(group(distilled=False), 0.0)[0]


def test_tokens_that_the_teacher_does_not_know_have_no_term():
    batch = pack(training_sequences(reference(), group(), None, LIMITS))
    assert batch.teacher_mask_BT.int().tolist() == [[0, 1, 1, 0]] * 2
    assert batch.teacher_logprobs_BT.tolist() == [[0, -0.25, -0.25, 0]] * 2


def test_the_runs_own_teacher_goes_before_the_environments():
    own = TeacherLogprobs(
        run="r", env="words", group="0" * 32, teacher="t", tokenizer_hash="t", temperature=1.0,
        logprobs=as_bytes(np.full(8, -2.0, np.float32), "float32"), missing=[1],
    )  # fmt: skip
    first, second = training_sequences(reference(), group(), own, LIMITS)
    assert first.teacher_logprobs.tolist() == pytest.approx([-2.0] * 4)
    assert second.teacher_logprobs is None
