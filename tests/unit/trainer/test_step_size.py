"""Learning rates by size, warm-up and schedule, and what becomes of a step that moves the policy too far."""

import math

import msgspec
import pytest
import torch

from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, learner_on_record
from lachesis.pipeline.trainer.learner import Learner
from lachesis.pipeline.trainer.metrics import mismatch_of
from lachesis.pipeline.trainer.step_size import PROBE_TOKENS, StepProbe
from lachesis.schemas.errors import ConfigError, DataError, SchemaError

FAR = {"learning_rate": 0.05, "warmup_steps": 0, "max_step_kl": 0.01}


@pytest.mark.parametrize(("parameters", "rate"), [(0.45e6, 3e-4), (135e6, 1.7e-5), (1.6e9, 5e-6), (7e9, 2.4e-6)])
def test_rate_falls_with_the_root_of_what_is_trained(parameters, rate):
    assert LearnerConfig().peak_rate(parameters) == pytest.approx(rate, rel=0.02)
    assert LearnerConfig(learning_rate=1e-3).peak_rate(parameters) == 1e-3


def test_rate_counts_trained_parameters_alone(small_policy):
    policy = small_policy()
    policy.model.get_input_embeddings().weight.requires_grad_(requires_grad=False)
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    learner = Learner(policy.model, LearnerConfig(warmup_steps=0))
    assert learner.learning_rate == pytest.approx(0.2 / math.sqrt(trained))


def test_warmup_rises_to_the_peak_and_schedules_fall_from_it():
    assert [LearnerConfig(warmup_steps=4).rate_factor(n) for n in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert LearnerConfig(warmup_steps=0).rate_factor(0) == 1
    linear = LearnerConfig(warmup_steps=2, schedule="linear", schedule_steps=12, final_fraction=0.2)
    assert [linear.rate_factor(n) for n in (2, 7, 12, 99)] == pytest.approx([1, 0.6, 0.2, 0.2])
    cosine = LearnerConfig(warmup_steps=0, schedule="cosine", schedule_steps=10, final_fraction=0)
    assert [cosine.rate_factor(n) for n in (0, 5, 10, 11)] == pytest.approx([1, 0.5, 0, 0])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"schedule": "cosine"}, "set schedule_steps"),
        ({"schedule_steps": 5, "schedule": "linear"}, "more than warmup_steps"),
        ({"on_large_step": "refuse", "max_step_kl": None}, "no max_step_kl"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        LearnerConfig(**settings)


def test_steps_use_the_rate_of_their_number_also_after_a_resume(small_policy, batch):
    config = LearnerConfig(learning_rate=1e-3, warmup_steps=4)
    first = Learner(small_policy().model, config)
    policy = small_policy()
    resumed = Learner(policy.model, config, steps=2)
    assert [first.step(batch(policy, 0)).learning_rate for _ in range(5)] == [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3]
    assert resumed.step(batch(policy, 0)).learning_rate == 7.5e-4


def test_a_report_says_how_far_the_step_went_and_what_entropy_it_began_with(small_policy, batch):
    policy = small_policy()
    step = Learner(policy.model, LearnerConfig(learning_rate=1e-3)).step(batch(policy, 0))
    found = mismatch_of(step, {})
    assert (found.k1, found.k3, found.step_kl, found.entropy) == (step.kl_k1, step.kl, step.step_kl, step.entropy)
    assert found.step_kl is not None
    assert found.entropy is not None
    assert found.entropy > 0
    assert mismatch_of(msgspec.structs.replace(step, step_kl=None, entropy=math.inf), {}).step_kl is None
    assert mismatch_of(msgspec.structs.replace(step, step_kl=None, entropy=math.inf), {}).entropy is None


def test_old_records_mean_what_was_done_then():
    old = {"learning_rate": 3e-4, "beta1": 0.9, "loss": {"clip_low": 0.2}}
    settings = learner_on_record(msgspec.json.encode(old))
    assert (settings.learning_rate, settings.warmup_steps, settings.max_step_kl) == (3e-4, 0, None)
    config = LearnerConfig(warmup_steps=7, on_large_step="shorten")
    assert learner_on_record(msgspec.json.encode(config)) == config
    for damaged in (b"[]", b"{", b'{"learning_rate": "high"}'):
        with pytest.raises(SchemaError, match=r"numerics\.learner"):
            learner_on_record(damaged)


def test_kl_of_a_step_is_that_of_the_policies_before_and_after(small_policy, batch):
    policy = small_policy()
    data = batch(policy, 0)
    before, _ = token_logprobs(policy.model, data.tokens_BT, 1.0)
    metrics = Learner(policy.model, LearnerConfig(learning_rate=1e-2, warmup_steps=0)).step(data)
    after, _ = token_logprobs(policy.model, data.tokens_BT, 1.0)
    moved = (after - before).detach()[data.mask_BT]
    assert metrics.step_kl == pytest.approx((moved.exp() - 1 - moved).mean().item(), rel=1e-4)
    assert metrics.step_kl > 0
    assert metrics.step_share == 1
    unmeasured = Learner(small_policy().model, LearnerConfig(max_step_kl=None)).step(data)
    assert unmeasured.step_kl is None


@pytest.mark.slow
def test_probe_takes_rows_evenly_and_no_more_than_it_may(small_policy, batch):
    data = batch(small_policy(), 0, rows=300)
    probe = StepProbe.of(data, torch.zeros(data.tokens_BT.shape), torch.device("cpu"))
    rows, width = probe.batch.tokens_BT.shape
    assert PROBE_TOKENS / 2 < rows * width <= PROBE_TOKENS
    assert torch.equal(probe.batch.tokens_BT[1], data.tokens_BT[-(-300 // (PROBE_TOKENS // width))])


def test_large_steps_are_told_with_the_setting_to_lower(small_policy, batch):
    policy = small_policy()
    metrics = Learner(policy.model, LearnerConfig(**FAR)).step(batch(policy, 0))
    assert metrics.step_kl > 0.01
    assert "Lower training.learner.learning_rate, now 0.05" in metrics.large_step
    small = Learner(small_policy().model, LearnerConfig(**FAR | {"learning_rate": 1e-5})).step(batch(policy, 0))
    assert small.large_step is None


def test_shortened_steps_go_the_same_way_and_stay_within_the_bound(small_policy, batch):
    policies = [small_policy() for _ in range(2)]
    start = policy_tensors(small_policy().model)
    data = batch(policies[0], 0)
    full = Learner(policies[0].model, LearnerConfig(**FAR)).step(data)
    short = Learner(policies[1].model, LearnerConfig(**FAR, on_large_step="shorten")).step(data)
    assert 0 < short.step_kl <= 0.01 < full.step_kl
    assert 0 < short.step_share < 1
    assert f"{short.step_share:.3g} of it was taken" in short.large_step
    ends = [policy_tensors(policy.model) for policy in policies]
    for name, tensor in start.items():
        torch.testing.assert_close(ends[1][name] - tensor, short.step_share * (ends[0][name] - tensor))


def test_refused_steps_leave_weights_and_optimizer_as_they_were(small_policy, batch):
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig(learning_rate=1e-5, warmup_steps=0))
    learner.step(batch(policy, 0))
    kept = [value.clone() for state in learner.optimizer.state.values() for value in state.values()]
    digest = weights_digest(policy_tensors(policy.model))
    learner.configure(LearnerConfig(**FAR, on_large_step="refuse"))
    with pytest.raises(DataError, match="it was undone, and its batch is void"):
        learner.step(batch(policy, 1))
    assert weights_digest(policy_tensors(policy.model)) == digest
    assert learner.steps == 1
    now = [value for state in learner.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))


def test_first_step_can_be_refused_too(small_policy, batch):
    policy = small_policy()
    digest = weights_digest(policy_tensors(policy.model))
    learner = Learner(policy.model, LearnerConfig(**FAR, on_large_step="refuse"))
    with pytest.raises(DataError, match="undone"):
        learner.step(batch(policy, 0))
    assert weights_digest(policy_tensors(policy.model)) == digest
    assert not learner.optimizer.state
