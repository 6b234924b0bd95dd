"""The optimizer step: it learns, is exact to the bit, and refuses what it cannot train on without touching weights."""

import msgspec
import numpy as np
import pytest
import torch

from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, WarmStartConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.packed_batch import pack
from lachesis.pipeline.trainer.training_sequence import TrainingSequence
from lachesis.pipeline.trainer.warmstart import warm_start
from lachesis.schemas.errors import ConfigError, DataError


def test_token_logprobs_are_those_of_the_sequence_alone_and_padding_changes_nothing(small_policy):
    policy = small_policy()
    tokens = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    padded, entropy = token_logprobs(policy.model, tokens, 2.0)
    alone, _ = token_logprobs(policy.model, torch.tensor([[9, 10]]), 2.0)
    assert padded[:, 0].tolist() == [0, 0]
    assert padded[1, 1].item() == pytest.approx(alone[0, 1].item(), abs=1e-5)
    logits = policy.model(tokens).logits[0, 0] / 2.0
    assert padded[0, 1].item() == pytest.approx(logits.log_softmax(-1)[6].item(), abs=1e-5)
    expected = torch.distributions.Categorical(logits=logits).entropy().item()
    assert entropy[0, 1].item() == pytest.approx(expected, abs=1e-5)


def test_step_raises_good_tokens_and_lowers_bad_ones(small_policy, batch):
    policy = small_policy()
    data = batch(policy, 0)
    learner = Learner(policy.model, LearnerConfig(learning_rate=1e-3))
    first = learner.step(data)
    after, _ = token_logprobs(policy.model, data.tokens_BT, 1.0)
    change = ((after - data.logprobs_BT) * data.advantages_BT.sign() * data.mask_BT).sum()
    assert change.item() > 0
    assert first.step == learner.steps == 1
    assert first.kl == pytest.approx(0, abs=1e-5)
    assert first.ratio_mean == pytest.approx(1, abs=1e-5)
    assert first.clip_fraction == 0
    assert first.sequences == 6
    assert first.trainable_tokens == int(data.mask_BT.sum())
    assert first.tokens == int(data.lengths_B.sum())
    assert learner.step(data).kl > 1e-6


def test_two_learners_agree_to_the_bit(small_policy, batch):
    digests = []
    for _ in range(2):
        policy = small_policy()
        learner = Learner(policy.model, LearnerConfig())
        metrics = [learner.step(batch(policy, seed)) for seed in range(3)]
        losses = [msgspec.structs.replace(m, seconds=0.0) for m in metrics]
        digests.append((weights_digest(policy_tensors(policy.model)), losses))
    assert digests[0] == digests[1]


def test_microbatches_give_the_gradient_of_the_whole_batch(small_policy, batch):
    norms = []
    for budget in (10_000, 25):
        policy = small_policy()
        metrics = Learner(policy.model, LearnerConfig(max_tokens_per_microbatch=budget)).step(batch(policy, 1))
        norms.append((metrics.loss, metrics.grad_norm, metrics.entropy))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loss_mask": np.zeros(4, bool)}, "no trainable token"),
        ({"tokens": np.array([1, 2, 30_000, 4], np.int32)}, "token id 30000"),
        ({"advantage": 1e38}, "not finite"),
    ],
)
def test_refused_batches_leave_weights_and_optimizer_alone(changes, text, small_policy, batch):
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig())
    learner.step(batch(policy, 0))
    before = weights_digest(policy_tensors(policy.model))
    values = {
        "tokens": np.array([1, 2, 3, 4], np.int32),
        "loss_mask": np.array([False, True, True, True]),
        "logprobs": np.full(4, -3, np.float32),
        "advantage": 1.0,
    }
    with pytest.raises(DataError, match=text):
        learner.step(pack([TrainingSequence(**{**values, **changes})] * 8))
    assert weights_digest(policy_tensors(policy.model)) == before
    assert learner.steps == 1
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert all(float(state["step"]) == 1 for state in learner.optimizer.state.values())


@pytest.mark.slow
def test_warm_start_lowers_the_loss_and_repeats_to_the_bit(small_policy):
    pairs = [(f"say {word}", word) for word in ("cat", "dog", "bird")]
    config = WarmStartConfig(steps=30, batch_size=8)
    digests = []
    for _ in range(2):
        policy = small_policy()
        losses = warm_start(policy, iter(pairs), config)
        assert len(losses) == 30
        assert losses[-1] < 0.6 * losses[0]
        digests.append(weights_digest(policy_tensors(policy.model)))
    assert digests[0] == digests[1]


def test_warm_start_learns_the_slips_it_is_shown(small_policy):
    pairs = [("say it", "ab")]
    likeliest = []
    for slips in (0.0, 1.0):
        policy = small_policy()
        warm_start(policy, pairs, WarmStartConfig(steps=25, batch_size=4, slips=slips))
        messages = [{"role": "user", "content": "say it"}]
        prompt = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            likeliest.append(policy.tokenizer.decode([policy.model(torch.tensor([prompt])).logits[0, -1].argmax()]))
    assert likeliest == ["a", "b"]


def test_warm_start_refuses_nothing_and_too_much(small_policy):
    with pytest.raises(DataError, match=r"no .* pairs"):
        warm_start(small_policy(), [], WarmStartConfig(steps=1))
    with pytest.raises(DataError, match="context 48"):
        warm_start(small_policy(), [("x" * 60, "y")], WarmStartConfig(steps=1))


@pytest.mark.slow
def test_kl_to_the_reference_keeps_the_policy_near_it(small_policy, batch):
    moved = {}
    for coef in (0.0, 5.0):
        policy, reference = small_policy(), small_policy().model.requires_grad_(False)
        config = LearnerConfig(learning_rate=3e-3, warmup_steps=0, loss=LossConfig(kl_coef=coef))
        learner = Learner(policy.model, config, reference=reference)
        metrics = [learner.step(batch(small_policy(), 0)) for _ in range(8)]
        before = weights_digest(policy_tensors(small_policy().model))
        assert weights_digest(policy_tensors(reference)) == before
        after, _ = token_logprobs(policy.model, batch(small_policy(), 0).tokens_BT, 1.0)
        data = batch(small_policy(), 0)
        moved[coef] = (after - data.logprobs_BT)[data.mask_BT].abs().mean().item()
        assert (metrics[-1].reference_kl is None) == (coef == 0)
    assert moved[5.0] < 0.5 * moved[0.0]
    assert metrics[0].reference_kl == pytest.approx(0, abs=1e-6)
    assert metrics[-1].reference_kl > 0


def test_kl_without_a_reference_is_refused(small_policy):
    with pytest.raises(ConfigError, match="no reference model"):
        Learner(small_policy().model, LearnerConfig(loss=LossConfig(kl_coef=0.1)))


@pytest.mark.slow
def test_an_entropy_bonus_raises_the_entropy(small_policy, batch):
    last = {}
    for coef in (0.0, 1.0):
        policy = small_policy()
        config = LearnerConfig(learning_rate=3e-3, warmup_steps=0, loss=LossConfig(entropy_coef=coef))
        learner = Learner(policy.model, config)
        last[coef] = [learner.step(batch(small_policy(), 0)).entropy for _ in range(8)][-1]
    assert last[1.0] > last[0.0] + 0.01
