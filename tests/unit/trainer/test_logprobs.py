"""Logprobs a slice of the logits at a time: the same values and gradients as from all logits, for unlike models."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen2Config, Qwen3Config

from lachesis.pipeline.model import logit_memory
from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.layers import recompute_layers
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError

SMALL = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama, rope theta 500000": LlamaConfig(**SMALL, rope_theta=500000.0),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2, biases": Qwen2Config(**SMALL),
    "qwen3, QK norm": Qwen3Config(**SMALL),
    "gemma2, soft cap": Gemma2Config(**SMALL, final_logit_softcapping=0.2, query_pre_attn_scalar=8),
}


def a_model(config):
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(params=MODELS)
def model(request):
    return a_model(MODELS[request.param])


@pytest.fixture(params=[1 << 28, 20_000, 1], ids=["one slice", "slices", "a slice for each token"])
def _slices(request, monkeypatch):
    monkeypatch.setattr(logit_memory, "CPU_SLICE_BYTES", request.param)


TOKENS = torch.randint(0, 301, (4, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.rand((4, 20), generator=torch.Generator().manual_seed(2)) < 0.6
MASK[:, 0] = False


def from_all_logits(model, temperature):
    """The reference: every logit at once, in float64."""
    logits = model(input_ids=TOKENS, use_cache=False).logits[:, :-1].double() / temperature
    all_BTV = logits.log_softmax(-1)
    picked = all_BTV.gather(-1, TOKENS[:, 1:, None]).squeeze(-1)
    return picked, torch.distributions.Categorical(logits=logits).entropy()


@pytest.mark.usefixtures("_slices")
def test_values_and_gradients_are_those_of_all_logits(model):
    expected, entropy = from_all_logits(model, 0.7)
    weight = torch.linspace(-1, 1, 76).view(4, 19)
    (expected * weight * MASK[:, 1:]).sum().backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    ours, our_entropy = SampledLogprobs(model)(TOKENS, 0.7, MASK)
    (ours[:, 1:] * weight).sum().backward()
    assert ours.dtype == torch.float32
    assert not ours[~MASK].any()
    assert not our_entropy[~MASK].any()
    torch.testing.assert_close(ours[MASK].double(), expected[MASK[:, 1:]], atol=1e-5, rtol=0)
    torch.testing.assert_close(our_entropy[MASK].double(), entropy[MASK[:, 1:]], atol=1e-5, rtol=0)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], atol=1e-5, rtol=1e-3, msg=name)


def test_heads_that_do_more_than_multiply_are_found_out():
    assert {name: SampledLogprobs(a_model(config)).is_sliced for name, config in MODELS.items()} == {
        name: "soft cap" not in name for name in MODELS
    }


def test_no_pass_holds_more_logits_than_a_slice(monkeypatch):
    monkeypatch.setattr(logit_memory, "CPU_SLICE_BYTES", 4 * 301 * 5)
    model, rows = a_model(MODELS["qwen2, biases"]), []
    sampled = SampledLogprobs(model)
    model.lm_head.register_forward_hook(lambda _module, _args, logits: rows.append(len(logits)))
    sampled(TOKENS, 1.0, MASK)[0].sum().backward()
    assert max(rows) == 5
    assert sum(rows) == 2 * int(MASK.sum())  # forward, and once more for the gradient


def test_in_bfloat16_only_the_products_are():
    model, dtypes = a_model(MODELS["qwen3, QK norm"]), set()
    model.lm_head.register_forward_hook(lambda _module, _args, logits: dtypes.add(logits.dtype))
    precise, _ = SampledLogprobs(model)(TOKENS, 1.0)
    rounded, _ = SampledLogprobs(model, torch.bfloat16)(TOKENS, 1.0)
    assert dtypes == {torch.float32, torch.bfloat16}
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - precise).abs().max() < 0.05
    rounded.sum().backward()
    assert {value.grad.dtype for value in model.parameters()} == {torch.float32}


def test_a_float32_head_brings_bfloat16_nearer_to_the_exact_logprobs():
    model, dtypes = a_model(MODELS["qwen3, QK norm"]), set()
    with torch.no_grad():
        model.lm_head.weight *= 30  # logits as large as a trained model's
    precise, _ = SampledLogprobs(model)(TOKENS, 1.0, MASK)
    rounded, _ = SampledLogprobs(model, torch.bfloat16)(TOKENS, 1.0, MASK)
    model.lm_head.register_forward_hook(lambda _module, args, logits: dtypes.update((args[0].dtype, logits.dtype)))
    nearer, _ = SampledLogprobs(model, torch.bfloat16, float32_head=True)(TOKENS, 1.0, MASK)
    assert dtypes == {torch.float32}
    assert 0 < (nearer - precise).abs().mean() < 0.8 * (rounded - precise).abs().mean()
    nearer.sum().backward()
    assert {value.grad.dtype for value in model.parameters()} == {torch.float32}


def test_a_learner_takes_up_the_head_s_precision_and_gives_it_up(small_policy, batch):
    policy, kls = small_policy(), []
    start = {name: value.clone() for name, value in policy.model.state_dict().items()}
    learner = Learner(policy.model, LearnerConfig(precision="bfloat16"))
    data = batch(policy, 0)
    for on in (False, True, False):
        policy.model.load_state_dict(start)
        learner.configure(LearnerConfig(precision="bfloat16", float32_head=on))
        kls.append(learner.step(data).kl)
    assert kls[0] == kls[2] != kls[1]


def test_layers_computed_again_change_no_gradient_and_switch_no_dropout_on(small_policy, batch):
    policy = small_policy()
    data, calls, norms = batch(policy, 0), [], []
    layer = policy.model.model.layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    for again in (False, True, False):
        policy.model.load_state_dict(small_policy().model.state_dict())
        learner = Learner(policy.model, LearnerConfig(recompute_layers=again, packing=False, max_step_kl=None))
        calls.clear()
        norms.append(learner.step(data).grad_norm)
        assert len(calls) == (2 if again else 1)
        assert not layer.mlp.training
        assert not policy.model.training
    assert norms[0] == norms[1] == norms[2]


def test_a_model_without_layers_to_compute_again_is_refused():
    with pytest.raises(ConfigError, match="recompute_layers: Linear has no layers"):
        recompute_layers(torch.nn.Linear(2, 2), on=True)


def test_learning_in_bfloat16_keeps_weights_and_moments_in_float32(small_policy, batch):
    policy = small_policy()
    learner = Learner(policy.model, LearnerConfig(precision="bfloat16"))
    metrics = learner.step(batch(policy, 0))
    assert {value.dtype for value in policy.model.parameters()} == {torch.float32}
    assert {value.dtype for state in learner.optimizer.state.values() for value in state.values()} == {torch.float32}
    assert 0 < metrics.kl < 1e-3  # engine and trainer differ by bfloat16's rounding
    assert not LearnerConfig().uses_bfloat16("cpu")
    assert LearnerConfig().uses_bfloat16("cuda")
