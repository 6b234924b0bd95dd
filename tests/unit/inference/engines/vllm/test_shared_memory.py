"""A model with vLLM's joined and padded matrices on a trainer's segment, without vLLM."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lachesis.pipeline.inference.engines.vllm.shared_memory import SharedModel
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.shared_memory import WeightSegment, segment_pointer
from lachesis.pipeline.model.tensors import policy_tensors, policy_version
from lachesis.schemas.errors import DataError

WIDTH = 32
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def linear(rows, columns, dtype=torch.float32):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(rows, columns, dtype=dtype))
    return layer


def norm():
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(WIDTH))
    return layer


class JoinedModel(nn.Module):
    """The layout of vLLM's Llama: joined matrices, rows of the vocabulary padded to 64, the head tied."""

    packed_modules_mapping = JOINED

    def __init__(self, vocabulary, layers=2, dtype=torch.float32):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = linear(-(-vocabulary // 64) * 64, WIDTH, dtype)
        self.model.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            layer.self_attn.qkv_proj, layer.self_attn.o_proj = linear(3 * WIDTH, WIDTH), linear(WIDTH, WIDTH)
            layer.mlp.gate_up_proj, layer.mlp.down_proj = linear(8 * WIDTH, WIDTH), linear(WIDTH, 4 * WIDTH)
            layer.input_layernorm, layer.post_attention_layernorm = norm(), norm()
            self.model.layers.append(layer)
        self.model.norm = norm()

    def load(self, tensors):
        with torch.no_grad():
            for name, held in self.named_parameters():
                *path, module, kind = name.split(".")
                parts = [tensors[".".join([*path, part, kind])] for part in JOINED.get(module, [module])]
                rows = torch.cat(parts)
                held.zero_()
                held[: len(rows)] = rows


class World:
    def __init__(self, folder, trainer, served, load=None):
        self.folder = folder
        self.trainer = trainer
        self.served = served
        tensors = policy_tensors(trainer)
        expected = {name: tensor.to("meta") for name, tensor in tensors.items()}
        text = SimpleNamespace(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text, enforce_eager=True))
        self.rope = text.rope_parameters
        self.shared = SharedModel(config, served, expected, load or served.load)

    def serve(self, trainer=None, change=None):
        """Share the weights of a trainer, publish them and attach the model."""
        trainer = trainer or self.trainer
        segment = WeightSegment.share(trainer)
        if change is not None:
            change(segment)
        segment.announce(self.folder)
        version = policy_version(0, "a", policy_tensors(trainer))
        segment.publish(version)
        self.shared.update(segment_pointer(self.folder), version)
        return segment


def tiny(seed=0, layers=2):
    return build_tiny_policy(seed, width=WIDTH, layers=layers, max_length=32).model


@pytest.fixture
def world(tmp_path):
    trainer = tiny()
    return World(tmp_path, trainer, JoinedModel(trainer.config.vocab_size))


def test_each_step_of_the_trainer_is_in_the_joined_matrices_and_the_padding_stays_zero(world):
    segment = world.serve()
    with segment.changing(), torch.no_grad():
        for parameter in world.trainer.parameters():
            parameter.add_(1.0)
    right = JoinedModel(world.trainer.config.vocab_size)
    right.load(policy_tensors(world.trainer))
    for name, held in world.served.named_parameters():
        assert torch.equal(held, right.get_parameter(name)), name


def test_a_dtype_mismatch_is_refused_and_names_the_tensors(world):
    def rename(segment):
        at = segment._memory.find(b'"dtype":"float32"')
        segment._memory[at : at + 17] = b'"dtype":"float16"'

    with pytest.raises(DataError, match=r"1 of another dtype: model\.embed_tokens\.weight is float16"):
        world.serve(change=rename)
    served = JoinedModel(world.trainer.config.vocab_size, dtype=torch.bfloat16)
    with pytest.raises(DataError, match=r"model\.embed_tokens\.weight is served in bfloat16"):
        World(world.folder, tiny(), served).serve()


def test_layers_that_are_missing_within_a_list_of_modules_are_refused_and_named(world):
    with pytest.raises(DataError, match=r"9 missing: model\.layers\.1\."):
        world.serve(tiny(layers=1))


def test_another_rotary_embedding_is_refused_and_both_are_named(world):
    other = tiny()
    other.config.rope_parameters = {**other.config.rope_parameters, "rope_theta": 500000.0}
    with pytest.raises(DataError, match=r"500000\.0.*10000\.0"):
        world.serve(other)


def test_a_layout_that_vllms_own_loader_contradicts_is_refused_and_the_weights_before_stay(world):
    before = {name: held.detach().clone() for name, held in world.served.named_parameters()}

    def load(tensors):
        world.served.load(tensors)
        with torch.no_grad():
            world.served.model.layers[1].self_attn.qkv_proj.weight[0] += 1

    wrong = World(world.folder, tiny(), world.served, load)
    with pytest.raises(DataError, match=r"something else of 1 parameters .*layers\.1\.self_attn\.qkv_proj\.weight"):
        wrong.serve()
    assert all(torch.equal(held, before[name]) for name, held in world.served.named_parameters())


def test_a_parameter_that_is_no_rows_of_the_segment_is_refused_and_named(world):
    world.served.model.layers[0].mlp.extra = linear(3, WIDTH)
    with pytest.raises(DataError, match=r"1 parameters of vLLM are not rows .*layers\.0\.mlp\.extra\.weight"):
        world.serve()


def test_another_generation_is_attached_to_and_detaching_leaves_the_weights(world):
    world.serve()
    second = tiny(1)
    world.serve(second)
    right = JoinedModel(second.config.vocab_size)
    right.load(policy_tensors(second))
    world.shared.detach()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(1.0)
    for name, held in world.served.named_parameters():
        assert torch.equal(held, right.get_parameter(name)), name
