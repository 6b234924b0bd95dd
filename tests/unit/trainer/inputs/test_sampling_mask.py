"""Logprobs over the tokens that a sampler left, against float64, and the tokens outside of it."""

import httpx
import numpy as np
import pytest
import torch

from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.environment.environment import Environment
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.engines.reference.app import build_app
from lachesis.pipeline.inference.engines.reference.engine import Engine
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.model import logit_memory
from lachesis.pipeline.tasks.task import Task
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, ModelInputConfig
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError

from .groups import group, packed, selected

INPUT = ModelInputConfig(input="sampling_mask")
READS = {"columns": ["sampling_mask"]}
VOCABULARY = 40


def masked_group(model, *, width=6, k=5, seed=0, lengths=(8, 11)):
    """Tokens sampled among `k`, the logprobs [T] over those in float64, and the mask."""
    draw = np.random.default_rng(seed)
    tokens, logprobs, masks = [], [], []
    for n in lengths:
        one = draw.integers(5, VOCABULARY, n).astype(np.int32)
        mask = np.full((n, width), -1)
        for t in range(n):
            others = draw.choice(np.delete(np.arange(VOCABULARY), one[t]), k - 1, replace=False)
            mask[t, :k] = draw.permutation([one[t], *others])
        mask[4] = -1  # nothing was excluded there
        with torch.no_grad():
            logits = model(torch.from_numpy(one[None].astype(np.int64))).logits[0].double()
        values = np.zeros(n)
        for t in range(1, n):
            among = mask[t, :k] if t != 4 else np.arange(logits.shape[1])
            values[t] = float(logits[t - 1, one[t]] - logits[t - 1, among].logsumexp(0))
        tokens.append(one)
        logprobs.append(values)
        masks.append(mask)
    return group(tokens, logprobs, {"sampling_mask": (np.concatenate(masks), "int32")})


def learner_of(policy, **settings):
    learner = Learner(policy.model, LearnerConfig(**{"learning_rate": 1e-3, "warmup_steps": 0} | settings))
    learner.inputs = load_inputs([INPUT], policy, policy.model)
    return learner


@pytest.mark.parametrize("logit_bytes", [1 << 28, 4 * 512])
def test_logprobs_are_over_the_tokens_that_were_left(small_policy, logit_bytes, monkeypatch):
    monkeypatch.setattr(logit_memory, "CPU_SLICE_BYTES", logit_bytes)
    policy = small_policy()
    learner = learner_of(policy)
    batch = packed([masked_group(policy.model)], learner.inputs, **READS)
    with torch.no_grad():
        found = learner._logprobs(batch)
    assert torch.allclose(found[batch.mask_BT], batch.logprobs_BT[batch.mask_BT], atol=1e-5)
    metrics = learner.step(batch)
    assert metrics.kl == pytest.approx(0, abs=1e-6)
    assert metrics.entropy < (11 * np.log(5) + 2 * np.log(learner.model.config.vocab_size)) / 13


def test_tokens_outside_get_no_gradient_and_the_entropy_has_a_finite_one(small_policy):
    policy = small_policy()
    learner = learner_of(policy, loss=LossConfig(entropy_coef=0.1))
    rollout = masked_group(policy.model, k=1, lengths=(8,))  # one token left: nothing to learn but at position 4
    batch = packed([rollout], learner.inputs, **READS)
    seen = learner._gradient(batch, 1)
    assert np.isfinite(seen.norm)
    learner.optimizer.zero_grad()
    single = batch.rows(torch.tensor([0]))
    single.mask_BT[:, 4] = False
    assert learner._gradient(single, 1).norm == 0


def test_groups_with_and_without_a_mask_and_of_other_widths_go_together(small_policy):
    policy = small_policy()
    learner = learner_of(policy)
    narrow, wide = masked_group(policy.model, width=5), masked_group(policy.model, width=9, seed=1)
    draw = [np.arange(6, 12, dtype=np.int32)]
    plain = group(draw, [np.full(6, -1.0)])
    batch = packed([narrow, wide, plain], learner.inputs, **READS)
    with torch.no_grad():
        found = learner._logprobs(batch)
    both = batch.mask_BT.clone()
    both[4] = False
    assert torch.allclose(found[both], batch.logprobs_BT[both], atol=1e-5)


def test_a_mask_without_the_sampled_token_costs_its_group_alone(small_policy):
    policy = small_policy()
    learner = learner_of(policy)
    good = masked_group(policy.model)
    lacking = np.full((6, 2), 1)
    bad = group([np.arange(6, 12, dtype=np.int32)], [np.full(6, -1.0)], {"sampling_mask": (lacking, "int32")})
    unknown = group(
        [np.arange(6, 12, dtype=np.int32)], [np.full(6, -1.0)], {"sampling_mask": (lacking * 4000, "int32")}
    )
    floats = group(
        [np.arange(6, 12, dtype=np.int32)], [np.full(6, -1.0)], {"sampling_mask": (lacking * 1.0, "float32")}
    )
    many = group(
        [np.arange(6, 12, dtype=np.int32)], [np.full(6, -1.0)], {"sampling_mask": (np.full((6, 9000), 1), "int16")}
    )
    found = selected([bad, good, unknown, floats, many], learner.inputs, **READS)
    assert [ref.seq for ref in found.refs] == [2]
    assert found.dropped[1] == "sampling_mask: sequence 0: token 3 is 9, which its mask excludes"
    assert found.dropped[3].startswith("sampling_mask: sequence 0: token id 4000, where the model knows")
    assert "token ids of type float32" in found.dropped[4]
    assert "9000 token ids in a row, where the model knows" in found.dropped[5]


def test_columns_that_no_token_uses_take_no_memory_and_a_mask_without_any_id_excludes_nothing(small_policy):
    policy = small_policy()
    learner = learner_of(policy)
    wide, plain = (masked_group(policy.model, width=width) for width in (9000, 5))
    empty = group(
        [np.arange(6, 12, dtype=np.int32)], [np.full(6, -1.0)], {"sampling_mask": (np.full((6, 9), -1), "int16")}
    )
    batch = packed([wide, empty], learner.inputs, **READS)
    assert learner.inputs.of(batch).allowed.shape[2] == 5
    alone = packed([empty], learner.inputs, **READS)
    with torch.no_grad():
        same = learner._logprobs(packed([plain], learner.inputs, **READS))
        assert torch.allclose(learner._logprobs(batch)[:2], same, atol=1e-5)
        whole = learner._sampled(alone.tokens_BT, 1.0, alone.mask_BT)[0]
        assert torch.allclose(learner._logprobs(alone), whole, atol=1e-5)


def test_a_loss_over_tokens_that_it_may_exclude_is_refused():
    learner = LearnerConfig(loss=LossConfig(teacher_kl="reverse"))
    with pytest.raises(ConfigError, match=r"tokens that training\.inputs sampling_mask may exclude"):
        RunConfig(model="m", training=TrainingConfig(inputs=[INPUT], learner=learner))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 0.9), (0.8, 0.5), (3.0, 0.3)])
async def test_what_our_server_samples_with_top_p_has_a_ratio_of_one(small_policy, temperature, top_p):
    policy = small_policy()
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=12, sampling_mask=True, seed=1)
    with Engine(policy.model, eos_token_id=policy.tokenizer.eos_token_id, weight_version="0-a-b") as engine:
        app = build_app(policy, engine, model_name="tiny", weights_folder="nowhere")
        client = InferenceClient(ClientConfig(url="http://test"), transport=httpx.ASGITransport(app))
        draft = await collect_group(Words(), Words().task(0), client, 4, sampling)
    made = build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")
    learner = learner_of(policy, temperature=temperature)
    batch = packed([made], learner.inputs, **READS)
    with torch.no_grad():
        masked = (learner._logprobs(batch) - batch.logprobs_BT)[batch.mask_BT].exp()
        learner.inputs = load_inputs([], policy, policy.model)
        whole = (learner._logprobs(batch) - batch.logprobs_BT)[batch.mask_BT].exp()
    torch.testing.assert_close(masked, torch.ones_like(masked), atol=1e-4, rtol=0)
    assert whole.mean() < top_p + 0.05, "which is what the mask is for"


class Words(Environment):
    def __len__(self):
        return 1

    def task(self, index):
        return Task(item="i", prompt="say")

    def reward(self, task, session):
        return float(session.sample)
