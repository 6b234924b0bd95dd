"""The loss against values worked out by hand from the formulas, and its invariants."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.trainer.config import LossConfig
from lachesis.pipeline.trainer.loss import LossMetrics, loss_denominator, policy_loss
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.errors import ConfigError

OLD = -1.0


def one_token(advantage, ratio, config=None, teacher=None):
    """Loss, gradient of the logprob and metrics of a batch with one trainable token."""
    config = config or LossConfig()
    batch = pack(
        [
            TrainingSequence(
                tokens=np.array([1, 2], np.int32),
                loss_mask=np.array([False, True]),
                logprobs=np.array([0, OLD], np.float32),
                advantage=advantage,
                teacher_logprobs=None if teacher is None else np.array([0, teacher], np.float32),
            )
        ]
    )
    logprobs = torch.tensor([[0.0, OLD + math.log(ratio)]], requires_grad=True)
    output = policy_loss(logprobs, torch.full((1, 2), 0.7), batch, config, denominator=loss_denominator(batch, config))
    output.loss.backward()
    return output.loss.item(), logprobs.grad[0, 1].item(), LossMetrics.from_sums(output.sums)


@pytest.mark.parametrize(
    ("ratio", "advantage", "surrogate", "clipped"),
    [
        (1.0, 1.0, 1.0, False),
        (1.1, 1.0, 1.1, False),
        (2.0, 1.0, 1.28, True),  # upper clip
        (0.5, 1.0, 0.5, False),  # the smaller one, unclipped: a good token that became rare is pulled back in full
        (2.0, -1.0, -2.0, False),  # the smaller one; taking the larger would give -1.28
        (0.5, -1.0, -0.8, True),  # lower clip
        (5.0, -1.0, -3.0, True),  # dual clip
        (5.0, -2.0, -6.0, True),
        (1.0, 0.0, 0.0, False),
    ],
)
def test_surrogate_by_hand(ratio, advantage, surrogate, clipped):
    loss, gradient, metrics = one_token(advantage, ratio)
    assert loss == pytest.approx(-surrogate, rel=1e-5)
    # d(-rho A)/d(log pi) = -rho A where no clip acts
    assert gradient == pytest.approx(0.0 if clipped else -ratio * advantage, rel=1e-5, abs=1e-7)
    assert metrics.clip_fraction == float(clipped)


def test_without_dual_clip_the_loss_of_a_bad_token_is_unbounded():
    assert one_token(-1.0, 5.0, LossConfig(dual_clip=None))[0] == pytest.approx(5.0, rel=1e-5)


def test_statistics_by_hand():
    _, _, metrics = one_token(1.0, 2.0)
    assert metrics.kl_k1 == pytest.approx(-math.log(2), rel=1e-5)
    assert metrics.kl == pytest.approx(2 - 1 - math.log(2), rel=1e-5)
    assert metrics.ratio_mean == pytest.approx(2.0, rel=1e-5)
    assert metrics.entropy == pytest.approx(0.7, rel=1e-5)
    assert metrics.effective_sample_size == pytest.approx(1.0)
    assert metrics.teacher_kl_k1 is None


def test_effective_sample_size_by_hand():
    batch = two_sequences()
    logprobs = batch.logprobs_BT + torch.tensor([[0, math.log(3), 0, 0], [0, 0, 0, 0]])
    sums = policy_loss(logprobs, torch.zeros(2, 4), batch, LossConfig(), denominator=4).sums
    assert LossMetrics.from_sums(sums).effective_sample_size == pytest.approx((3 + 3) ** 2 / (4 * (9 + 3)))


def test_teacher_term_lowers_the_advantage_by_coef_times_k1():
    # log pi = -1 and log pi_teacher = -1.5, so k1 = .5 and the advantage is 1 - .2 * .5
    loss, _, metrics = one_token(1.0, 1.0, LossConfig(teacher_coef=0.2), teacher=-1.5)
    assert loss == pytest.approx(-0.9, rel=1e-5)
    assert metrics.teacher_kl_k1 == pytest.approx(0.5, rel=1e-5)


def test_teacher_is_measured_and_not_used_at_coef_zero():
    loss, _, metrics = one_token(1.0, 1.0, teacher=-1.5)
    assert loss == pytest.approx(-1.0)
    assert metrics.teacher_kl_k1 == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("mismatch", "weight"), [(0.5, 0.5), (1.5, 1.5), (8.0, 2.0)])
def test_proximal_anchor_weights_by_the_truncated_mismatch(mismatch, weight):
    loss, gradient, metrics = one_token(1.0, mismatch, LossConfig(anchor="proximal"))
    assert loss == pytest.approx(-weight, rel=1e-5)
    assert gradient == pytest.approx(-weight, rel=1e-5)
    assert metrics.clip_fraction == 0
    assert metrics.ratio_mean == pytest.approx(1.0)


def test_proximal_anchor_without_cap_is_plain_policy_gradient():
    assert one_token(1.0, 8.0, LossConfig(anchor="proximal", tis_cap=None))[0] == pytest.approx(-1.0)


def two_sequences(trainable=True):
    mask = np.array([[False, True, True, True], [False, True, False, False]]) & trainable
    return pack(
        [
            TrainingSequence(
                tokens=np.array([1, 2, 3, 4], np.int32),
                loss_mask=row,
                logprobs=np.full(4, -1, np.float32),
                advantage=advantage,
            )
            for row, advantage in zip(mask, (1.0, -3.0), strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LossConfig(), -(3 * 1 - 3) / 4),
        (LossConfig(aggregation="constant_length", constant_length=10), -(3 * 1 - 3) / 20),
    ],
)
def test_aggregation(config, expected):
    batch = two_sequences()
    loss = policy_loss(
        batch.logprobs_BT, torch.zeros(2, 4), batch, config, denominator=loss_denominator(batch, config)
    ).loss
    assert loss.item() == pytest.approx(expected, abs=1e-7)


def test_what_stands_off_the_mask_changes_nothing_and_gets_no_gradient():
    batch = two_sequences()
    clean = batch.logprobs_BT.clone().requires_grad_()
    dirty = torch.where(batch.mask_BT, batch.logprobs_BT, torch.tensor(-1e9)).requires_grad_()
    entropy = torch.where(batch.mask_BT, 1.0, torch.nan)
    outputs = [policy_loss(lp, entropy, batch, LossConfig(), denominator=4) for lp in (clean, dirty)]
    assert outputs[0].loss.item() == outputs[1].loss.item()
    outputs[1].loss.backward()
    assert torch.isfinite(dirty.grad).all()
    assert (dirty.grad[~batch.mask_BT] == 0).all()
    assert LossMetrics.from_sums(outputs[1].sums).entropy == 1.0


def test_batch_without_trainable_tokens_gives_zero_loss_zero_gradient_and_no_statistics():
    batch = two_sequences(trainable=False)
    logprobs = torch.full((2, 4), -1.0, requires_grad=True)
    config = LossConfig()
    output = policy_loss(logprobs, torch.ones(2, 4), batch, config, denominator=loss_denominator(batch, config))
    output.loss.backward()
    assert output.loss.item() == 0
    assert (logprobs.grad == 0).all()
    assert set(LossMetrics.from_sums(output.sums)) == {None}


def test_extreme_ratios_stay_finite():
    loss, gradient, metrics = one_token(-1.0, math.exp(60.0))
    assert math.isfinite(loss)
    assert math.isfinite(gradient)
    assert math.isfinite(metrics.kl)


@given(st.floats(-3, 3), st.floats(0.05, 20))
def test_loss_is_never_below_that_of_the_plain_ratio_and_dual_clip_bounds_it(advantage, ratio):
    loss, _, metrics = one_token(advantage, ratio)
    plain = -ratio * advantage
    if advantage >= 0:
        assert loss >= plain - 1e-4
        assert loss >= -1.28 * advantage - 1e-4
    else:
        assert loss <= -3 * advantage + 1e-4
    assert metrics.kl >= -1e-6


@pytest.mark.parametrize("values", [{"dual_clip": 1.0}, {"clip_low": 1.5}])
def test_contradicting_settings_are_refused(values):
    with pytest.raises(ConfigError):
        LossConfig(**values)
