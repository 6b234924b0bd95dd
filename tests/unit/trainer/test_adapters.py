"""Low-rank adapters: what is published is the whole model, a resumed trainer has the bits of one that went on."""

from functools import partial
from math import sqrt

import pytest
import torch
from checkpoints import save_checkpoint
from msgspec import convert
from transformers import AutoModelForCausalLM, GPT2Config, GraniteMoeConfig, LlamaConfig, Qwen3MoeConfig

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.errors import CheckpointError
from lachesis.pipeline.ledger.checkpoint_state import latest_checkpoint
from lachesis.pipeline.model.config import LoraConfig
from lachesis.pipeline.model.logprobs import SampledLogprobs, token_logprobs
from lachesis.pipeline.model.policy import ModelSetup, load_model, save_policy
from lachesis.pipeline.model.tensors import load_tensors, policy_tensors, weights_digest
from lachesis.pipeline.model.tokenizer import save_tokenizer
from lachesis.pipeline.trainer.adapters import ADAPTER, load_trainable_model, with_adapters
from lachesis.pipeline.trainer.checkpoint import load_checkpoint
from lachesis.pipeline.trainer.config import LearnerConfig, LossConfig
from lachesis.pipeline.trainer.learner import Learner
from lachesis.schemas.errors import ConfigError

CONFIG = LearnerConfig(learning_rate=1e-2, warmup_steps=0)
LORA = LoraConfig(rank=4)


@pytest.fixture
def base(tmp_path, small_policy):
    save_policy(small_policy(), tmp_path / "base")
    return tmp_path / "base"


def setup(base, lora=LORA):
    return ModelSetup(lora=lora, base=str(base), seed=3)


def digest(model):
    return weights_digest(policy_tensors(model))


def save(folder, policy, learner):
    save_checkpoint(folder, policy, learner, lineage="abc", ledger_position=0, chain_hash="", unreported=[])
    return latest_checkpoint(folder)


def test_fresh_adapters_change_nothing_and_are_the_same_each_time(base):
    state = torch.get_rng_state()
    models = [load_trainable_model(base, setup(base)).model for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert digest(models[0]) == digest(load_model(base).model)
    adapters = [{name: value for name, value in model.named_parameters() if value.requires_grad} for model in models]
    assert adapters[0].keys() == adapters[1].keys()
    assert all("lora_" in name for name in adapters[0])
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def test_only_adapters_are_trained_and_what_is_published_is_the_whole_model(base, batch, small_policy):
    policy = load_trainable_model(base, setup(base))
    learner = Learner(policy.model, CONFIG)
    data = batch(small_policy(), 0)
    frozen = {name: value.clone() for name, value in policy.model.named_parameters() if not value.requires_grad}
    for _ in range(3):
        learner.step(data)
    assert all(torch.equal(value, policy.model.get_parameter(name)) for name, value in frozen.items())
    served = load_model(base)
    tensors = policy_tensors(policy.model)
    assert digest(served.model) != weights_digest(tensors)
    load_tensors(served.model, tensors)  # as an inference server does: names, shapes and dtypes are the base model's
    with torch.no_grad():
        ours = SampledLogprobs(policy.model)(data.tokens_BT, 1.0, data.mask_BT)[0]
        theirs = SampledLogprobs(served.model)(data.tokens_BT, 1.0, data.mask_BT)[0]
    assert SampledLogprobs(policy.model).is_sliced
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_the_empty_table_is_a_preset_with_a_rate_for_what_it_trains(base):
    lora = convert({"training": {"lora": {}}}, run_config_type()).training.lora
    policy = load_trainable_model(base, setup(base, lora))
    adapters = [value for name, value in policy.model.named_parameters() if value.requires_grad]
    assert {min(value.shape) for value in adapters} == {32}
    linear = [name for name, part in load_model(base).model.named_modules() if isinstance(part, torch.nn.Linear)]
    assert len(adapters) == 2 * len([name for name in linear if name != "lm_head"]), "each layer, in two factors"
    learner = Learner(policy.model, LearnerConfig(warmup_steps=0))
    assert learner.learning_rate == pytest.approx(0.2 / sqrt(sum(value.numel() for value in adapters)))


@pytest.mark.slow
def test_a_resumed_trainer_has_the_bits_of_one_that_went_on(tmp_path, base, batch, small_policy):
    straight = load_trainable_model(base, setup(base))
    learner = Learner(straight.model, CONFIG)
    for seed in range(4):
        learner.step(batch(small_policy(), seed))
    policy = load_trainable_model(base, setup(base))
    learner = Learner(policy.model, CONFIG)
    for seed in range(2):
        learner.step(batch(small_policy(), seed))
    resumed = load_checkpoint(save(tmp_path / "run", policy, learner), CONFIG, setup(base))
    assert digest(resumed.policy.model) == digest(policy.model)
    for seed in range(2, 4):
        resumed.learner.step(batch(small_policy(), seed))
    assert digest(resumed.policy.model) == digest(straight.model)


def test_a_checkpoint_is_an_ordinary_model_folder_and_has_the_adapters_beside(tmp_path, base, batch, small_policy):
    policy = load_trainable_model(base, setup(base))
    learner = Learner(policy.model, CONFIG)
    learner.step(batch(small_policy(), 0))
    folder = save(tmp_path / "run", policy, learner)
    assert digest(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) == digest(policy.model)
    assert (folder / ADAPTER / "adapter_model.safetensors").stat().st_size < 1 << 20


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (LORA, None, "is of a trainer with adapters: set training.lora as it was"),
        (None, LORA, "is of a trainer of all weights: leave training.lora out"),
        (LORA, LoraConfig(rank=8), "adapters of rank 4 and alpha 4, the configuration says 8 and 8"),
    ],
)
def test_other_adapters_than_the_checkpoints_are_refused(tmp_path, base, before, after, text):
    policy = load_trainable_model(base, setup(base, before))
    folder = save(tmp_path / "run", policy, Learner(policy.model, CONFIG))
    with pytest.raises(CheckpointError, match=text):
        load_checkpoint(folder, CONFIG, setup(base, after))


def test_adapters_of_another_base_are_refused(tmp_path, base, batch, small_policy):
    policy = load_trainable_model(base, setup(base))
    folder = save(tmp_path / "run", policy, Learner(policy.model, CONFIG))
    save_policy(small_policy(1), tmp_path / "other")
    with pytest.raises(CheckpointError, match="holds weights"):
        load_checkpoint(folder, CONFIG, setup(tmp_path / "other"))


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"targets": ["q_proj", "no_such_proj"]}, r"training\.lora\.targets: no module .* is called 'no_such_proj'"),
        ({"targets": ["q_porj"]}, "did you mean 'q_proj'"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["input_layernorm"]}, "targets: Target module LlamaRMSNorm"),
        ({"targets": ["lm_head"]}, "lm_head shares its weights with model.embed_tokens"),
        ({"targets": ["q_proj", "embed_tokens"]}, "model.embed_tokens shares its weights with lm_head"),
        ({"rank": 33, "targets": ["q_proj"]}, r"rank is 33, beyond the smaller side of model.layers.0.*q_proj \(32\)"),
        ({"rank": 200}, "rank is 200, beyond the smaller side of .* and 10 more"),
    ],
)
def test_adapters_that_cannot_be_are_named(base, lora, said):
    with pytest.raises(ConfigError, match=said):
        load_trainable_model(base, setup(base, LoraConfig(**{"rank": 4} | lora)))


def moved(policy):
    """Give the adapters values, as training does."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        (LlamaConfig, {"targets": ["lm_head"]}),
        (LlamaConfig, {"targets": ["embed_tokens", "q_proj"]}),
        (GPT2Config, {}),
        (partial(Qwen3MoeConfig, **EXPERTS), {}),
    ],
)
def test_what_is_published_and_exported_is_what_is_trained(tmp_path, small_policy, kind, lora):
    config = kind(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    save_tokenizer(small_policy().tokenizer, tmp_path / "base")
    policy = load_trainable_model(tmp_path / "base", setup(tmp_path / "base", LoraConfig(rank=2, **lora)))
    before = token_logprobs(policy.model, TOKENS, 1.0)[0]
    moved(policy)
    served = load_model(tmp_path / "base")
    load_tensors(served.model, policy_tensors(policy.model))
    save_policy(policy, tmp_path / "export")
    with torch.no_grad():
        ours = token_logprobs(policy.model, TOKENS, 1.0)[0]
        assert (ours - before).abs().max() > 1e-3
        for other in (served, load_model(tmp_path / "export")):
            torch.testing.assert_close(token_logprobs(other.model, TOKENS, 1.0)[0], ours, atol=1e-4, rtol=0)


def test_experts_that_get_no_adapter_are_named(caplog):
    config = GraniteMoeConfig(
        vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with_adapters(AutoModelForCausalLM.from_config(config), LoraConfig(rank=2), 0)
    assert "so they stay as they are: model.layers.0.block_sparse_moe.experts.gate_up_proj" in caplog.text


TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def test_kl_to_the_reference_needs_no_second_model(base, batch, small_policy):
    policy = load_trainable_model(base, setup(base))
    learner = Learner(policy.model, LearnerConfig(learning_rate=1e-2, warmup_steps=0, loss=LossConfig(kl_coef=0.1)))
    found = [learner.step(batch(small_policy(), 0)).reference_kl for _ in range(3)]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert found[2] > 1e-4
