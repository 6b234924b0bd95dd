"""Every objective against an independent reference: float64, one token at a time, from the papers' formulas.

Gradients are compared with central differences of that reference, except at what an objective holds without gradient:
there the reference is given the values before the difference, as the papers' stop-gradient says.
"""

import math

import numpy as np
import pytest
import torch

from lachesis.pipeline.trainer.config import LossConfig
from lachesis.pipeline.trainer.loss import LossMetrics, loss_denominator, policy_loss
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.schemas.errors import ConfigError

CASES = {
    "ppo": {},
    "ppo, no dual clip": {"dual_clip": None},
    "ppo, proximal, truncated": {"anchor": "proximal"},
    "ppo, proximal, masked (MIS)": {"anchor": "proximal", "outside": "mask", "tis_cap": 1.5},
    "ppo, proximal, masked on both sides (IcePop)": {
        "anchor": "proximal",
        "outside": "mask",
        "tis_floor": 0.7,
        "tis_cap": 1.5,
    },
    "ppo, rollout, masked": {"outside": "mask", "tis_cap": 1.5},
    "ppo, sequence cap": {"sequence_cap": 1.3},
    "ppo, teacher": {"teacher_coef": 0.3},
    "ppo, KL k3": {"kl_coef": 0.2},
    "ppo, KL k1": {"kl_coef": 0.2, "kl_estimator": "k1"},
    "ppo, entropy": {"entropy_coef": 0.1},
    "ppo, sequence mean": {"aggregation": "sequence_mean"},
    "ppo, constant length": {"aggregation": "constant_length", "constant_length": 7},
    "ppo, geometric mask": {"geometric_floor": 0.9, "geometric_cap": 1.05},
    "ppo, off-policy mask": {"off_policy_threshold": 0.05},
    "ppo, off-policy mask, teacher": {"off_policy_threshold": 0.05, "teacher_coef": 1.5},
    "gspo": {"objective": "gspo"},
    "gspo, token mean": {"objective": "gspo", "aggregation": "token_mean"},
    "sapo": {"objective": "sapo"},
    "sapo, sharp": {"objective": "sapo", "tau_positive": 3.0, "tau_negative": 5.0},
    "sapo, proximal, truncated": {"objective": "sapo", "anchor": "proximal"},
    "gspo, wide": {"objective": "gspo", "clip_low": 0.3, "clip_high": 0.3},
    "cispo": {"objective": "cispo"},
    "cispo, narrow": {"objective": "cispo", "clip_low": 0.2, "clip_high": 0.2},
    "dppo, tv": {"objective": "dppo", "max_divergence": 0.05},
    "dppo, kl": {"objective": "dppo", "divergence": "kl", "max_divergence": 0.02},
    "everything": {
        "objective": "cispo",
        "anchor": "proximal",
        "outside": "mask",
        "sequence_cap": 2.0,
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "teacher_coef": 0.2,
        "aggregation": "sequence_mean",
    },
}


def a_batch(seed=0):
    """Five sequences with ratios from .4 to 2.5, advantages of both signs, one without a teacher."""
    draw = np.random.default_rng(seed)
    sequences, current = [], []
    for row, length in enumerate((6, 9, 4, 8, 5)):
        rollout = -draw.uniform(0.05, 3, length)
        current.append(np.minimum(rollout + draw.normal(0, 0.4, length), -0.01))
        sequences.append(
            TrainingSequence(
                tokens=draw.integers(0, 50, length).astype(np.int32),
                loss_mask=(np.arange(length) > 0) & (draw.random(length) < 0.8),
                logprobs=rollout.astype(np.float32),
                advantage=(-1.0) ** row * draw.uniform(0.3, 2),
                teacher_logprobs=None if row == 3 else -draw.uniform(0.05, 3, length).astype(np.float32),
            )
        )
    batch = pack(sequences)
    width = batch.tokens_BT.shape[1]
    logprobs = np.stack([np.pad(values, (0, width - len(values))) for values in current]).astype(np.float32)
    entropy = draw.uniform(0, 2, logprobs.shape).astype(np.float32)
    reference = -draw.uniform(0.05, 3, logprobs.shape).astype(np.float32)
    return batch, *(values.astype(np.float64) for values in (logprobs, entropy, reference))


def reference_loss(config, batch, now, entropy, reference, held):  # noqa: PLR0917
    """The loss, by the formulas. `now` [B][T] has the gradient; `held` is what stands under a stop-gradient."""
    total, lengths = 0.0, []
    averaging = config.aggregation or ("sequence_mean" if config.objective == "gspo" else "token_mean")
    for b in range(batch.sequences):
        where = [t for t in range(int(batch.lengths_B[b])) if batch.mask_BT[b, t]]
        lengths.append(len(where))
        mu = {t: float(batch.logprobs_BT[b, t]) for t in where}
        w = {t: math.exp(held[b][t] - mu[t]) for t in where}
        anchor = mu if config.anchor == "rollout" else {t: held[b][t] for t in where}
        for t in where:
            advantage = float(batch.advantages_BT[b, t])
            if batch.teacher_mask_BT[b, t]:
                advantage -= config.teacher_coef * (held[b][t] - float(batch.teacher_logprobs_BT[b, t]))
            if config.kl_coef and config.kl_estimator == "k1":
                advantage -= config.kl_coef * (held[b][t] - reference[b][t])
            if config.objective == "gspo":  # the sequence's ratio, the token's gradient
                mean = sum(held[b][u] - anchor[u] for u in where) / len(where)
                rho = math.exp(mean) * math.exp(now[b][t] - held[b][t])
            else:
                rho = math.exp(now[b][t] - anchor[t])
            value = surrogate(config, rho, math.exp(held[b][t] - anchor[t]), now[b][t], held[b][t], mu[t], advantage)
            if config.anchor == "proximal":
                if config.outside == "mask":
                    value *= w[t]
                elif config.tis_cap is not None:
                    value *= min(w[t], config.tis_cap)
            loss = 0.0 if left_out(config, w[t], list(w.values()), advantage) else -value
            if config.kl_coef and config.kl_estimator == "k3":
                r = math.exp(reference[b][t] - now[b][t])
                loss += config.kl_coef * (r - 1 - math.log(r))
            loss -= config.entropy_coef * entropy[b][t]
            total += loss / len(where) if averaging == "sequence_mean" else loss
    divisor = {
        "token_mean": sum(lengths),
        "sequence_mean": sum(n > 0 for n in lengths),
        "constant_length": batch.sequences * config.constant_length,
    }
    return total / divisor[averaging]


def left_out(config, w, of_sequence, advantage):
    product, mean = math.prod(of_sequence), math.prod(of_sequence) ** (1 / len(of_sequence))
    return (
        (config.outside == "mask" and not (config.tis_floor or 0) <= w <= config.tis_cap)
        or product > (config.sequence_cap or math.inf)
        or not (config.geometric_floor or 0) <= mean <= (config.geometric_cap or math.inf)
        or (advantage < 0 and -math.log(mean) > (config.off_policy_threshold or math.inf))
    )


def surrogate(config, rho, held_rho, logprob, held, mu, advantage):  # noqa: PLR0917
    low, high = 1 - config.low, 1 + config.high
    if config.objective == "cispo":
        return min(max(held_rho, low), high) * advantage * logprob
    if config.objective == "dppo":
        pi, m = math.exp(held), math.exp(mu)
        apart = (
            abs(pi - m) if config.divergence == "tv" else m * math.log(m / pi) + (1 - m) * math.log((1 - m) / (1 - pi))
        )
        further = (advantage > 0 and pi > m) or (advantage < 0 and pi < m)
        return 0.0 if apart > config.max_divergence and further else rho * advantage
    if config.objective == "sapo":
        tau = config.tau_positive if advantage > 0 else config.tau_negative
        return 4 / tau / (1 + math.exp(-tau * (rho - 1))) * advantage
    value = min(rho * advantage, min(max(rho, low), high) * advantage)
    if config.objective == "ppo" and config.dual_clip is not None and advantage < 0:
        value = max(value, config.dual_clip * advantage)
    return value


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_formulas(case, seed):
    config = LossConfig(**CASES[case])
    batch, logprobs, entropy, reference = a_batch(seed)
    now = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    with_gradient = torch.tensor(entropy, dtype=torch.float64, requires_grad=True)
    given = torch.tensor(reference, dtype=torch.float64) if config.kl_coef else None
    denominator = loss_denominator(batch, config)
    output = policy_loss(now, with_gradient, batch, config, denominator=denominator, reference_BT=given)
    output.loss.backward()
    held = logprobs
    expected = reference_loss(config, batch, held, entropy, reference, held)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    step = 1e-6
    for b in range(batch.sequences):
        for t in range(batch.tokens_BT.shape[1]):
            values = []
            for sign in (1, -1):
                moved = held.copy()
                moved[b, t] += sign * step
                values.append(reference_loss(config, batch, moved, entropy, reference, held))
            difference = (values[0] - values[1]) / (2 * step)
            assert now.grad[b, t].item() == pytest.approx(difference, rel=1e-6, abs=1e-8), (b, t)
            on_mask = bool(batch.mask_BT[b, t])
            assert bool(with_gradient.grad is not None and with_gradient.grad[b, t]) == (
                on_mask and config.entropy_coef > 0
            )


def test_parts_of_a_batch_add_up():
    for case in CASES.values():
        config = LossConfig(**case)
        batch, logprobs, entropy, reference = a_batch()
        now, entropy, reference = (torch.tensor(values) for values in (logprobs, entropy, reference))
        denominator = loss_denominator(batch, config)
        given = reference if config.kl_coef else None
        whole = policy_loss(now, entropy, batch, config, denominator=denominator, reference_BT=given)
        loss, sums = 0.0, None
        for rows_b, part in batch.microbatches(12):
            width = part.tokens_BT.shape[1]
            output = policy_loss(
                now[rows_b, :width],
                entropy[rows_b, :width],
                part,
                config,
                denominator=denominator,
                reference_BT=None if given is None else given[rows_b, :width],
            )
            loss += output.loss.item()
            sums = output.sums if sums is None else type(sums)(*map(torch.add, sums, output.sums))
        assert loss == pytest.approx(whole.loss.item(), rel=1e-5)
        ours, expected = (
            {name: value for name, value in LossMetrics.from_sums(added)._asdict().items() if value is not None}
            for added in (sums, whole.sums)
        )
        assert ours == pytest.approx(expected, rel=1e-5)


def test_what_is_left_out_is_counted():
    batch, logprobs, entropy, _ = a_batch()
    config = LossConfig(outside="mask", tis_floor=0.7, tis_cap=1.5)
    sums = policy_loss(torch.tensor(logprobs), torch.tensor(entropy), batch, config, denominator=1).sums
    w = np.exp(logprobs - batch.logprobs_BT.numpy())[batch.mask_BT.numpy()]
    assert LossMetrics.from_sums(sums).masked_fraction == pytest.approx(((w < 0.7) | (w > 1.5)).mean())


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"geometric_floor": 0.99, "geometric_cap": 1.01}, {(0.02, 1.0), (0.02, -1.0), (-0.02, 1.0), (-0.02, -1.0)}),
        ({"geometric_cap": 1.01}, {(0.02, 1.0), (0.02, -1.0)}),
        ({"off_policy_threshold": 0.01}, {(-0.02, -1.0)}),
    ],
)
@pytest.mark.parametrize("length", [2, 500])
def test_a_mask_of_sequences_has_the_same_bound_at_every_length(settings, left_out, length):
    """By hand: each token of a sequence is `drift` nats likelier than when it was sampled."""
    for drift in (0.02, 0.0, -0.02):
        for advantage in (1.0, -1.0):
            batch = pack(
                [
                    TrainingSequence(
                        tokens=np.ones(length + 1, np.int32),
                        loss_mask=np.arange(length + 1) > 0,
                        logprobs=np.full(length + 1, -1, np.float32),
                        advantage=advantage,
                    )
                ]
            )
            config = LossConfig(**settings)
            now = torch.full((1, length + 1), -1 + drift, requires_grad=True)
            output = policy_loss(now, torch.zeros(1, length + 1), batch, config, denominator=1)
            output.loss.backward()
            masked = (drift, advantage) in left_out
            assert LossMetrics.from_sums(output.sums).masked_fraction == masked
            assert bool(now.grad.any()) != masked


def test_the_gate_of_sapo_has_slope_one_where_nothing_has_moved_and_closes_on_both_sides():
    """By hand: the derivative of a sigmoid is 1/4 at 0; at rho = 3 and tau = 1 the gate is 4 * sigmoid(2)."""
    sequence = TrainingSequence(
        tokens=np.ones(3, np.int32), loss_mask=np.array([False, True, True]), logprobs=np.zeros(3, np.float32) - 4,
        advantage=1.0,
    )  # fmt: skip
    now = torch.tensor([[0.0, -4.0, -4 + math.log(3)]], requires_grad=True)
    config = LossConfig(objective="sapo")
    output = policy_loss(now, torch.zeros(1, 3), pack([sequence]), config, denominator=1)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-(2 + 3.52319), rel=1e-5)
    assert now.grad[0].tolist() == pytest.approx([0, -1, -3 * 4 * 0.880797 * 0.119203], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"tis_floor": 0.5}, 'needs outside = "mask"'),
        ({"tis_floor": 3.0, "outside": "mask"}, "below tis_cap"),
        ({"objective": "gspo", "clip_low": 1.0}, "clip_low is 1.0"),
        ({"geometric_floor": 1.01, "geometric_cap": 1.01}, "below geometric_cap"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        LossConfig(**settings)
