"""Routing replay: experts are those of the rollout, forward, backward and with layers computed again."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logprobs import token_logprobs
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.trainer.adapters import with_adapters
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig, ModelInputConfig
from lachesis.pipeline.trainer.inputs.model_inputs import load_inputs
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError

from .groups import group, packed, selected

LAYERS, EXPERTS, K = 2, 4, 2
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": LAYERS,
         "num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.3, "head_dim": 16}  # fmt: skip
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=EXPERTS, num_experts_per_tok=K),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=K),
    "olmoe": OlmoeConfig(**SIZES, num_experts=EXPERTS, num_experts_per_tok=K),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=K),
    "deepseek_v3": DeepseekV3Config(
        **SIZES | {"head_dim": 8}, moe_intermediate_size=16, n_routed_experts=EXPERTS, num_experts_per_tok=K, n_group=2,
        topk_group=2, first_k_dense_replace=0, q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, n_shared_experts=1,
    ),
}  # fmt: skip
INPUT = ModelInputConfig(input="routed_experts")
READS = {"columns": ["routed_experts"]}


def model(family="qwen3_moe"):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()


def learner_of(made, **settings):
    learner = Learner(made, LearnerConfig(**{"learning_rate": 1e-3, "warmup_steps": 0} | settings))
    learner.inputs = load_inputs([INPUT], PolicyModel(made, None, "t"), learner.trained)
    return learner


def rollouts(made, experts=None, lengths=(9, 12), dtype="int16"):
    """Sequences with the model's own logprobs, and a column of experts: given, or -1 alone."""
    draw = np.random.default_rng(1)
    tokens = [draw.integers(5, 60, n).astype(np.int32) for n in lengths]
    with torch.no_grad():
        logprobs = [
            token_logprobs(made, torch.from_numpy(one[None].astype(np.int64)), 1.0)[0][0].numpy() for one in tokens
        ]
    if experts is None:
        experts = np.full((sum(lengths), LAYERS * K), -1)
    return group(tokens, logprobs, {"routed_experts": (experts, dtype)})


def logprobs(learner, batch):
    with torch.no_grad():
        return learner._logprobs(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_used_by_models_of_any_family(family):
    made = model(family)
    learner = learner_of(made)
    draw = np.random.default_rng(2)
    forced = np.stack([draw.permuted(np.arange(EXPERTS))[:K] for _ in range(21 * LAYERS)]).reshape(21, LAYERS * K)
    own = packed([rollouts(made)], learner.inputs, **READS)
    other = packed([rollouts(made, forced)], learner.inputs, **READS)
    plain = token_logprobs(made, own.tokens_BT, 1.0)[0]
    unforced = logprobs(learner, own)
    assert torch.equal(torch.where(own.mask_BT, plain, 0), unforced)  # -1: the router picks by itself
    assert (logprobs(learner, other) - unforced)[own.mask_BT].abs().max() > 1e-2
    assert torch.equal(token_logprobs(made, own.tokens_BT, 1.0)[0], plain)  # outside of a pass nothing is changed


def test_the_experts_that_ran_are_the_recorded_ones():
    """By an independent count: what the experts of a layer are called with."""
    made = model()
    learner = learner_of(made)
    seen = []
    for layer in made.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].detach().clone()))
    forced = np.tile([3, 0, 1, 2], (21, 1))
    batch = packed([rollouts(made, forced)], learner.inputs, **READS)
    logprobs(learner, batch)
    real = torch.arange(batch.tokens_BT.shape[1]) < batch.lengths_B[:, None]
    first, second = (each.view(*batch.tokens_BT.shape, K)[real] for each in seen[-LAYERS:])
    assert (first == torch.tensor([3, 0])).all()
    assert (second == torch.tensor([1, 2])).all()


def test_replaying_what_the_model_chose_is_what_it_computes_without():
    """Recorded at one weight and replayed at it, the pass is the same; after a step, it still takes the old experts."""
    made = model()
    chosen = []
    for layer in made.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, args, out: chosen.append(out[2].clone()))
    rollout = rollouts(made)
    columns = []
    for tokens in (one.tokens for one in rollout.sequences):
        chosen.clear()
        with torch.no_grad():
            made(torch.from_numpy(tokens[None].astype(np.int64)))
        columns.append(np.concatenate([one.numpy() for one in chosen], axis=1))
    recorded = rollouts(made, np.concatenate(columns))
    learner = learner_of(made)
    batch = packed([recorded], learner.inputs, **READS)
    assert torch.allclose(logprobs(learner, batch)[batch.mask_BT], batch.logprobs_BT[batch.mask_BT], atol=1e-5)
    metrics = learner.step(batch)
    assert metrics.kl == pytest.approx(0, abs=1e-5)
    assert metrics.step_kl > 0


@pytest.mark.parametrize("first", [False, True])
def test_an_error_in_a_block_leaves_nothing_behind(first):
    made = model()
    learner = learner_of(made)
    batch = packed([rollouts(made, np.tile([3, 0, 1, 2], (21, 1)))], learner.inputs, **READS)
    right = logprobs(learner, batch)

    def fail(*_):
        raise RuntimeError("no memory left")

    seen = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    hook = made.model.layers[1].mlp.register_forward_pre_hook(fail, prepend=first)
    with Watched():
        with pytest.raises(RuntimeError, match="no memory left"):
            logprobs(learner, batch)
        seen.clear()
        torch.add(right, 1)
        assert seen == [torch.add]
    hook.remove()
    assert torch.equal(logprobs(learner, batch), right)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_is_that_of_the_recorded_experts(recompute):
    """Only experts that were recorded get a gradient, also where layers are computed again in the backward pass."""
    made = model()
    learner = learner_of(made, recompute_layers=recompute)
    batch = packed([rollouts(made, np.tile([0, 1, 2, 3], (21, 1)))], learner.inputs, **READS)
    experts = [layer.mlp.experts.down_proj for layer in made.model.layers]
    before = [one.detach().clone() for one in experts]
    single = batch.rows(torch.tensor([1]))  # the longest: no padding, whose tokens route by themselves
    learner.step(single)
    moved = [
        (layer.mlp.experts.down_proj - old).abs().amax((1, 2)) > 0
        for layer, old in zip(made.model.layers, before, strict=True)
    ]
    assert moved[0].tolist() == [True, True, False, False]
    # the last token routes by itself in the second layer too, but is followed by nothing that is trained
    assert moved[1].tolist() == [False, False, True, True]


def test_adapters_learn_with_the_recorded_experts_and_the_reference_routes_its_own_way():
    pytest.importorskip("peft")
    made = with_adapters(model(), LoraConfig(rank=2, targets=["q_proj", "v_proj"]), 0)
    learner = learner_of(made, loss=LossConfig(kl_coef=0.1))
    forced = packed([rollouts(model(), np.tile([3, 0, 1, 2], (21, 1)))], learner.inputs, **READS)
    metrics = learner.step(forced)
    assert metrics.step_kl > 0
    assert metrics.reference_kl > 1e-3  # fresh adapters change nothing: the distance is that of the routes


@pytest.mark.parametrize(
    ("experts", "dtype", "said"),
    [
        (np.full((21, 6), 0), "int16", "6 experts a token, where the model has 2 layers with 2: 4"),
        (np.full((21, 4), 4), "int16", "expert 4, where a layer has 4"),
        (np.full((21, 4), -2), "int16", "expert -2"),
        (np.full((21, 4), 255), "uint8", "expert 255, where a layer has 4"),
        (np.full((21, 4), np.nan), "float32", "experts of type float32, where integers with -1 for none are needed"),
        (np.tile([0, 1, 3, 3], (21, 1)), "int16",
         "experts [3, 3] of token 0 in layer 1, where 2 different ones, or -1 alone, are needed"),
        (np.tile([2, -1, 0, 1], (21, 1)), "int16",
         "experts [2, -1] of token 0 in layer 0, where 2 different ones, or -1 alone, are needed"),
    ],
)  # fmt: skip
def test_a_group_that_does_not_fit_is_left_out_by_name_and_the_others_stay(experts, dtype, said):
    made = model()
    learner = learner_of(made)
    bad, good, without = rollouts(made, experts, dtype=dtype), rollouts(made), rollouts(made)
    found = selected([bad, good], learner.inputs, **READS)
    assert [ref.seq for ref in found.refs] == [2]
    assert found.dropped[1] == f"routed_experts: sequence 0: {said}"
    assert len(packed([good, without], learner.inputs, **READS).prepared) == 4


def test_experts_may_be_numbered_without_a_sign():
    made = model()
    learner = learner_of(made)
    forced = np.tile([3, 0, 1, 2], (21, 1))
    one, other = (
        packed([rollouts(made, forced, dtype=dtype)], learner.inputs, **READS) for dtype in ("int16", "uint8")
    )
    assert torch.equal(logprobs(learner, one), logprobs(learner, other))


def test_a_dense_model_is_refused_at_the_start(small_policy):
    policy = small_policy()
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no router of experts: leave it out"):
        load_inputs([INPUT], policy, policy.model)
