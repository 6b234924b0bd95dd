"""Rollouts that outlive a policy: their older tokens count by importance ratios. Exact expectations, by enumeration.

A rollout says 0 and ends, or says 1 and one more token. Its first token was sampled by an old policy, its second by the
current one: new weights arrived between the two.
"""

import numpy as np
import pytest
import torch

from lachesis.pipeline.trainer.config import LossConfig
from lachesis.pipeline.trainer.loss import policy_loss
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence

REWARDS = {(0,): 0.3, (1, 0): 1.0, (1, 1): -0.4}
CONFIG = LossConfig(aggregation="constant_length", constant_length=1, clip_low=0.9, clip_high=9.0)
NOW = torch.tensor([[0.2, -0.3], [0.5, 0.1]], dtype=torch.float64)
"""Logits of the current policy: of the first token, and of the second."""
MOVED = NOW + torch.tensor([[-0.2, 0.4], [0.0, 0.0]])


def chosen(parameters, said):
    return torch.stack([parameters.log_softmax(-1)[i, token] for i, token in enumerate(said)])


def true_gradient():
    parameters = NOW.clone().requires_grad_()
    sum(chosen(parameters, said).sum().exp() * reward for said, reward in REWARDS.items()).backward()
    return parameters.grad


def expected_gradient(old, *, trains):
    """Return minus the expectation of the loss's gradient. `trains`: from a rollout to which of its tokens count."""
    total = torch.zeros_like(NOW)
    for said, reward in REWARDS.items():
        parameters = NOW.clone().requires_grad_()
        now = chosen(parameters, said)
        sampled = torch.where(torch.arange(len(said)) == 0, chosen(old, said), now.detach())
        mask = np.array([False, *trains(said)])
        if not mask.any():
            continue
        logprobs = np.where(mask, [0.0, *sampled.tolist()], 0).astype(np.float32)
        batch = pack([TrainingSequence(tokens=np.ones(len(mask), np.int32), loss_mask=mask, logprobs=logprobs,
                                       advantage=reward)])  # fmt: skip
        current = torch.cat([torch.zeros(1, dtype=torch.float64), now])[None]
        policy_loss(current, current.detach(), batch, CONFIG, denominator=1).loss.backward()
        total -= float(sampled.sum().exp()) * parameters.grad
    return total


def all_tokens(said):
    return [True] * len(said)


def test_all_tokens_give_the_gradient_and_what_leaves_old_ones_out_does_not():
    """The policy has not moved, so no ratio is needed, and yet leaving out by age is biased: it selects by length."""
    true = true_gradient()
    torch.testing.assert_close(expected_gradient(NOW, trains=all_tokens), true, atol=1e-6, rtol=1e-6)
    dropped = expected_gradient(NOW, trains=lambda said: [len(said) == 1] * len(said))
    masked = expected_gradient(NOW, trains=lambda said: [len(said) == 1 or i > 0 for i in range(len(said))])
    assert true[0, 1] > 0, "to go on is the better choice"
    assert dropped[0, 1] < 0, "rollouts that span policies dropped whole: the policy learns to be short"
    assert masked[0, 1] < 0, "their old tokens masked: it learns the same"


def test_an_old_tokens_own_gradient_is_exact_and_later_tokens_follow_the_old_policys_beginnings():
    true, found = true_gradient(), expected_gradient(MOVED, trains=all_tokens)
    torch.testing.assert_close(found[0], true[0], atol=1e-6, rtol=1e-6)
    began = float((chosen(MOVED, (1,)) - chosen(NOW, (1,))).exp())
    assert began > 1.2
    torch.testing.assert_close(found[1], began * true[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("by", [0.1, 0.01, 0.001])
def test_the_bias_that_is_left_shrinks_with_the_policys_move(by):
    found = expected_gradient(NOW + by * (MOVED - NOW), trains=all_tokens)
    assert float((found - true_gradient()).norm()) < by * float(true_gradient().norm())
