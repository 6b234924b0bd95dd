"""The learner on another device than batches and checkpoints are on: a stand-in for a GPU, in main memory."""

import pytest
import torch
from stand_in_gpu import DEVICE, move, stand_in

from lachesis.pipeline.model.tensors import load_tensors, policy_tensors, weights_digest
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.learner import Learner

SETTINGS = {
    "defaults": {},
    "a step that is shortened": {"on_large_step": "shorten", "learning_rate": 1e-1},
    "layers computed again": {"recompute_layers": True},
    "an entropy bonus": {"loss": LossConfig(entropy_coef=0.1)},
    "a reference": {"loss": LossConfig(kl_coef=0.1)},
    "small micro-batches": {"max_tokens_per_microbatch": 20},
}


def two_steps(policy, reference, batches, settings, *, moved):
    models = [policy.model, *([] if reference is None else [reference])]
    for model in models:
        model.set_attn_implementation("eager")
        if moved:
            move(model)
    given = {"warmup_steps": 0, "precision": "float32", "learning_rate": 1e-3} | settings
    learner = Learner(policy.model, LearnerConfig(**given), reference=reference)
    assert learner.device == (DEVICE if moved else torch.device("cpu"))
    return [learner.step(batch) for batch in batches]


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_steps_are_those_of_the_cpu_whatever_the_settings(small_policy, batch, name):
    settings = SETTINGS[name]
    batches = [batch(small_policy(), seed) for seed in (1, 2)]
    found = []
    for moved in (False, True):
        policy = small_policy()
        reference = small_policy(3).model if name == "a reference" else None
        found.append((two_steps(policy, reference, batches, settings, moved=moved), policy))
    (expected, there), (steps, elsewhere) = found
    for ours, right in zip(steps, expected, strict=True):
        for figure in ("loss", "grad_norm", "step_kl", "step_share", "entropy", "reference_kl"):
            wanted = getattr(right, figure)
            wanted = wanted if wanted is None else pytest.approx(wanted, rel=1e-3, abs=1e-6)
            assert getattr(ours, figure) == wanted, figure
    tensors = policy_tensors(elsewhere.model)
    for key, right in policy_tensors(there.model).items():
        torch.testing.assert_close(tensors[key].cpu(), right, rtol=1e-3, atol=1e-5)


def test_weights_have_one_digest_on_any_device_and_load_from_one_to_the_other(small_policy):
    one, other = small_policy(0), small_policy(1)
    moved = stand_in(policy_tensors(other.model))
    assert weights_digest(moved) == weights_digest(policy_tensors(other.model))
    load_tensors(one.model, moved)
    assert weights_digest(policy_tensors(one.model)) == weights_digest(moved)


def test_the_stand_in_refuses_what_a_gpu_refuses():
    here = torch.ones(2)
    there = stand_in({"a": here})["a"]
    with pytest.raises(RuntimeError, match="at least two devices"):
        there + here
    assert (there + 1).device == DEVICE
    assert (there + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0], "a number is taken from anywhere"
