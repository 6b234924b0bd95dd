"""A model that is incomplete or wrong is refused by the names of its tensors; what other uses need is no fault."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen3NextConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from lachesis.pipeline.model.completeness import add_faults_of_values
from lachesis.pipeline.model.faults import ModelFaults, is_spare
from lachesis.pipeline.model.model_check import check_model
from lachesis.pipeline.model.policy import ModelSetup, build_tiny_policy, load_model, save_policy
from lachesis.pipeline.model.shards import INDEX_FILE
from lachesis.pipeline.model.source import find_model
from lachesis.pipeline.model.tensors import policy_tensors, weights_digest
from lachesis.pipeline.model.tokenizer import save_tokenizer
from lachesis.schemas.errors import ConfigError

Q = "model.layers.0.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def policy():
    return build_tiny_policy(0, width=32, layers=2, heads=2, max_length=64)


@pytest.fixture
def make(policy, tmp_path):
    """Return a function that writes a model's folder, with other tensors and settings than it should have."""

    def made(change=None, config=None):
        folder = tmp_path / "model"
        save_policy(policy, folder)
        if change is not None:
            rewrite(folder, change)
        settings = json.loads((folder / "config.json").read_text()) | (config or {})
        (folder / "config.json").write_text(json.dumps(settings))
        return folder

    return made


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: one.clone() for name, one in change(tensors).items()}, folder / "model.safetensors", {"format": "pt"}
    )


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def with_tensor(name, tensor):
    return lambda tensors: tensors | {name: tensor}


def cast(dtype, names=("",)):
    return lambda tensors: {k: v.to(dtype) if k.startswith(tuple(names)) else v for k, v in tensors.items()}


def at(value, name=Q):
    def change(tensors):
        broken = tensors[name].clone()
        broken[3, 5] = value
        return tensors | {name: broken}

    return change


WRONG = [
    (without(Q), {}, rf"missing tensors \(1\): {Q}"),
    (without("model.norm.weight"), {}, r"missing tensors \(1\): model.norm.weight"),
    (lambda tensors: {f"module.{name}": one for name, one in tensors.items()}, {},
     r"missing tensors \(21\): .* and 17 more; unexpected tensors \(20\): module\.model\..* and 16 more"),
    (with_tensor("foo.weight", torch.ones(3)), {}, r"unexpected tensors \(1\): foo.weight"),
    (with_tensor(Q.replace(".0.", ".2."), torch.ones(32, 32)), {}, r"unexpected tensors \(1\): model.layers.2"),
    (None, {"num_hidden_layers": 3}, r"missing tensors \(9\): model.layers.2"),
    (None, {"num_hidden_layers": 1}, r"unexpected tensors \(9\): model.layers.1"),
    (with_tensor(Q, torch.ones(16, 32)), {}, rf"mis-shaped tensors \(1\): {Q} is \[16, 32\], by config.json \[32"),
    (None, {"num_key_value_heads": 1}, r"mis-shaped tensors \(4\): model.layers.0.self_attn.k_proj.weight"),
    (None, {"vocab_size": 200}, rf"mis-shaped tensors \(1\): {EMBEDDING} is \[101, 32\], by config.json \[200, 32\]"),
    (lambda tensors: {name: torch.zeros_like(one) for name, one in tensors.items()}, {},
     rf"tensors of nothing but zeros \(15\): {EMBEDDING}"),
    (lambda tensors: tensors | {Q: torch.zeros_like(tensors[Q])}, {},
     rf"tensors of nothing but zeros \(1\): {Q}"),
    (at(NAN), {}, rf"non-finite tensors \(1\): {Q}"),
    (at(-INF), {}, rf"non-finite tensors \(1\): {Q}"),
    (lambda tensors: cast(torch.float16)(at(INF)(tensors)), {}, r"non-finite tensors \(1\)"),
    (lambda tensors: {k: torch.full_like(v, NAN) for k, v in tensors.items()}, {},
     r"non-finite tensors \(20\): .* and 16 more"),
    (cast(torch.int8, [Q]), {}, rf"quantized weights \(1\): {Q} is I8"),
    (cast(torch.uint8), {}, r"quantized weights \(20\)"),
    (cast(torch.int32, [Q]), {}, rf"quantized weights \(1\): {Q} is I32"),
    (cast(torch.float8_e4m3fn, ["model.layers"]), {}, r"quantized weights \(18\): .* is F8_E4M3"),
    (None, {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\)"),
    (None, {"tie_word_embeddings": False},
     r"missing tensors \(1\): lm_head.weight \(if it is the embedding, set tie_word_embeddings = true"),
    (with_tensor("lm_head.weight", torch.ones(101, 32)), {},
     rf"tied tensors that differ \(1\): lm_head.weight differs from {EMBEDDING}"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "config", "said"), WRONG)
def test_what_is_wrong_is_named_when_it_is_loaded_and_by_doctor(make, change, config, said):
    folder = make(change, config)
    for look in (load_model, lambda path: check_model(str(path), ModelSetup())):
        with pytest.raises(ConfigError, match=said) as refused:
            look(folder)
        assert "model_exceptions" in str(refused.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(make):
    folder = make()
    larger = build_tiny_policy(0, width=32, layers=1, heads=2, phrases=["one", "two"]).tokenizer
    save_tokenizer(larger, folder)
    for look in (load_model, lambda path: check_model(str(path), ModelSetup())):
        with pytest.raises(
            ConfigError, match=r"tokenizer has 103 tokens, the model knows 101: choose .* not know 'one', 'two'"
        ):
            look(folder)
    load_model(folder, ModelSetup(exceptions=("tokenizer",)))


def test_a_chat_template_that_is_set_is_one_to_doctor_too(make):
    folder = make()
    tokenizer = load_model(folder).tokenizer
    template, tokenizer.chat_template = tokenizer.chat_template, None
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    for look in (load_model, lambda path, setup=ModelSetup(): check_model(str(path), setup)):  # noqa: B008 - frozen
        with pytest.raises(ConfigError, match="without a chat template"):
            look(folder)
        assert look(folder, ModelSetup(chat_template=template))


def test_values_of_one_byte_can_be_looked_at():
    faults = ModelFaults()
    tensors = {"a": torch.tensor([1.0, NAN]), "b": torch.tensor([1.0, 2.0])}
    add_faults_of_values(faults, ((name, one.to(torch.float8_e4m3fn)) for name, one in tensors.items()))
    assert "non-finite tensors (1): a." in faults.text("m")


def test_a_placeholder_of_a_picture_needs_no_row(make):
    folder = make()
    tokenizer = load_model(folder).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sep|>", "<image_soft_token>"]})
    save_tokenizer(tokenizer, folder)
    assert len(load_model(folder).tokenizer) == 102
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|sep|>", "<image_soft_token>", "<think>"]})
    save_tokenizer(tokenizer, folder)
    with pytest.raises(ConfigError, match="It does not know '<think>'"):
        load_model(folder)


def test_what_is_meant_is_excepted_said_and_the_same_each_time(make, caplog):
    folder = make(lambda tensors: without(Q)(at(NAN, "model.layers.1.mlp.up_proj.weight")(tensors)))
    with pytest.raises(ConfigError, match="non-finite tensors"):
        load_model(folder, ModelSetup(exceptions=(Q,)))
    setup = ModelSetup(exceptions=("model.layers.0.self_attn.*", "*.up_proj.weight"))
    state = torch.get_rng_state()
    digests = {weights_digest(policy_tensors(load_model(folder, setup).model)) for _ in range(2)}
    assert len(digests) == 1, "what is missing is drawn alike in trainer and servers"
    assert torch.equal(torch.get_rng_state(), state)
    assert f"{Q} (missing tensors)" in caplog.text
    assert check_model(str(folder), setup)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: data[:-1000], r"is cut off: \d+ bytes, where its header says \d+"),
        (lambda data: data + b"\0", "has more than its tensors"),
        (lambda data: data[:50], "is cut off, or no safetensors file"),
        (lambda data: b"", r"\(0 bytes\) is cut off"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "pointer of Git LFS"),
        (lambda data: b"\x02\0\0\0\0\0\0\0[]", "is no safetensors file"),
    ],
)
def test_a_damaged_file_is_named_before_anything_is_loaded(make, damage, said):
    file = make() / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    for look in (load_model, lambda path: find_model(str(path))):
        with pytest.raises(ConfigError, match=said) as refused:
            look(file.parent)
        assert str(file) in str(refused.value)


@pytest.fixture
def sharded(make, policy):
    folder = make()
    policy.model.save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    return folder


def test_a_shard_that_is_not_there_is_named(sharded):
    assert load_model(sharded)
    sorted(sharded.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(
        ConfigError, match=r"lacks 1 of the 9 files that its model.safetensors.index.json names: model-00002"
    ):
        find_model(str(sharded))


def test_an_index_that_promises_what_no_shard_has_is_refused(sharded):
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["model.gone.weight"] = next(iter(index["weight_map"].values()))
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names and no file has \(1\): model.gone.weight"):
        find_model(str(sharded))


def test_a_single_file_beside_the_shards_is_ambiguous(sharded, policy, tmp_path):
    save_policy(policy, tmp_path / "other")
    (sharded / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match="holds two models"):
        find_model(str(sharded))


def test_a_folder_of_adapters_is_no_model(make):
    folder = make()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "other/model"}')
    with pytest.raises(ConfigError, match="holds adapters"):
        load_model(folder)


TINY = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def families():
    """Yield a configuration and the tensors of published files that a model of text does without."""
    llama = LlamaConfig(**TINY)
    yield "score", llama, {"score.weight": (1, 32)}
    yield "v_head", llama, {"v_head.summary.weight": (1, 32), "v_head.summary.bias": (1,)}
    yield "inv_freq", llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}
    masks = {"h.0.attn.bias": (1, 1, 64, 64), "h.0.attn.masked_bias": ()}
    yield "gpt2", GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2), masks
    neox = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    yield "neox", GPTNeoXConfig(**neox), {"gpt_neox.layers.0.attention.bias": (1, 1, 64, 64)}
    deepseek = DeepseekV3Config(
        **TINY | {"num_key_value_heads": 2}, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8,
        qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, num_nextn_predict_layers=1,
    )  # fmt: skip
    further = {"model.layers.2.eh_proj.weight": (32, 64), "model.layers.2.self_attn.q_a_proj.weight": (8, 32)}
    yield "deepseek", deepseek, further
    hybrid = Qwen3NextConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, head_dim=16,
    )  # fmt: skip
    yield "qwen3_next", hybrid, {"mtp.fc.weight": (32, 64), "mtp.layers.0.input_layernorm.weight": (32,)}


@pytest.mark.parametrize(("config", "further"), [pytest.param(*of, id=name) for name, *of in families()])
def test_published_models_of_many_families_pass(policy, tmp_path, config, further):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(policy.tokenizer, tmp_path)
    integers = {name: torch.uint8 if name.endswith("attn.bias") else torch.float32 for name in further}
    rewrite(
        tmp_path, lambda all_: all_ | {name: torch.ones(shape, dtype=integers[name]) for name, shape in further.items()}
    )
    load_model(tmp_path)
    assert "parameters" in check_model(str(tmp_path), ModelSetup())
    first = next(
        name
        for name in load_file(tmp_path / "model.safetensors")
        if name not in further and ("norm" in name or "ln_" in name)
    )
    rewrite(tmp_path, without(first))
    with pytest.raises(ConfigError, match="missing tensors"):
        load_model(tmp_path)


def test_a_model_that_sees_is_trained_on_text_without_its_tower_and_not_on_images(policy, tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = TINY | {"head_dim": 16, "model_type": "gemma3_text"}
    model = Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))
    model.save_pretrained(tmp_path)
    save_tokenizer(policy.tokenizer, tmp_path)
    load_model(tmp_path)
    rewrite(tmp_path, lambda tensors: {name: one for name, one in tensors.items() if "vision" not in name})
    load_model(tmp_path)
    assert is_spare("model.vision_tower.x", {"vision_config": {}} | {"vision_config": {"a": 1}})
    assert not is_spare("model.vision_tower.x", {"vision_config": {"a": 1}}, images=True)
    assert not is_spare("model.vision_tower.x", {})


def test_bfloat16_and_equal_heads_are_as_good_as_any(make, policy):
    embedding = policy.model.get_input_embeddings().weight.detach()
    model = load_model(make(with_tensor("lm_head.weight", embedding), {"torch_dtype": "bfloat16"})).model
    assert model.lm_head.weight is model.model.embed_tokens.weight, "one tensor is published, as servers expect"
    assert EMBEDDING in policy_tensors(model)
    load_model(make(cast(torch.bfloat16)))


def test_the_first_few_are_named_and_all_are_counted():
    faults = ModelFaults(["b*"])
    faults.add_names("missing tensors", [f"a{i}" for i in range(9)])
    faults.add_names("missing tensors", ["b1"])
    assert "missing tensors (9): a0, a1, a2, a3 and 5 more" in str(faults.text("m"))
    assert ModelFaults().text("m") is None


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("model.layers.0.mlp.gate_proj.weight", True),
        ("model.layers.3.self_attn.o_proj.weight", True),
        ("model.layers.0.mixer.conv1d.weight", True),
        ("model.layers.0.mlp.gate.weight", False),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", False),
        ("model.embed_positions.weight", False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", False),
    ],
)
def test_a_matrix_of_zeros_is_refused_where_no_model_begins_with_one(name, refused):
    faults = ModelFaults()
    add_faults_of_values(faults, [("x", torch.ones(2, 2)), ("norm", torch.zeros(4)), (name, torch.zeros(4, 4))])
    text = faults.text("m")
    assert (text is not None and "nothing but zeros (1)" in text) == refused
    excepted = ModelFaults([name])
    add_faults_of_values(excepted, [(name, torch.zeros(4, 4))])
    assert excepted.text("m") is None
