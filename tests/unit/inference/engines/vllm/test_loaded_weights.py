"""The digest of what vLLM holds: of its joined and padded parameters, by the names of the checkpoint."""

import pytest
import torch
from torch import nn

from lachesis.pipeline.inference.engines.vllm.loaded_weights import digest_as_held, loaded_weights
from lachesis.pipeline.inference.protocol import LoadedWeights
from lachesis.pipeline.model.tensors import rounded, weights_digest, widened


class Held(nn.Module):
    """A model as vLLM builds it: query, key and value in one parameter, the embedding padded to 8 rows."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, tensors):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.qkv_proj = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(4, bias=False)
        with torch.no_grad():
            self.embed_tokens.weight[:5] = tensors["embed_tokens.weight"]
            self.norm.weight.copy_(tensors["norm.weight"])
            for kind in ("weight", "bias"):
                parts = [tensors[f"{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")]
                getattr(self.qkv_proj, kind).copy_(torch.cat(parts))


@pytest.fixture
def tensors():
    rows = {"q_proj": 4, "k_proj": 2, "v_proj": 2}
    made = {f"{name}.weight": torch.randn(count, 4) for name, count in rows.items()}
    made |= {f"{name}.bias": torch.randn(count) for name, count in rows.items()}
    return made | {"embed_tokens.weight": torch.randn(5, 4), "norm.weight": torch.randn(4)}


def digest(model, expected, dtype="float32"):
    return loaded_weights(model, expected, dtype, None).digest


def test_what_has_arrived_has_the_digest_of_what_was_sent(tensors):
    assert digest(Held(tensors), tensors) == weights_digest(tensors)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "k_proj.weight", "v_proj.bias", "norm.weight"])
def test_one_value_that_did_not_arrive_shows(tensors, name):
    sent = {**tensors, name: tensors[name].clone()}
    sent[name].view(-1)[-1] += 1
    assert digest(Held(tensors), tensors) != weights_digest(sent)


def test_what_is_held_in_a_form_not_known_is_named(tensors):
    expected = {**tensors, "experts.0.weight": torch.zeros(4, 4)}
    assert loaded_weights(Held(tensors), expected, "float32", None) == LoadedWeights(unknown=["experts.0.weight"])


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_weights_that_travelled_rounded_have_the_digest_that_they_travelled_with(tensors, held):
    sent = rounded(tensors, "bfloat16")
    delivered = widened(sent, tensors)
    model = Held(delivered).to(held)
    assert digest_as_held(model, delivered, "bfloat16") is None
    assert digest(model, tensors, "bfloat16") == weights_digest(sent)


@pytest.mark.parametrize(("held", "dtype"), [(torch.bfloat16, "float32"), (torch.float16, "bfloat16")])
def test_a_model_in_a_narrower_dtype_holds_what_was_delivered_rounded_and_nothing_else(tensors, held, dtype):
    delivered = widened(rounded(tensors, dtype), tensors)
    model = Held(delivered).to(held)
    as_held = digest_as_held(model, delivered, dtype)
    assert as_held is not None
    assert loaded_weights(model, tensors, dtype, as_held) == LoadedWeights(digest=as_held, rounded=as_held)
    with torch.no_grad():
        model.qkv_proj.weight[3, 1] += 1
    assert loaded_weights(model, tensors, dtype, as_held).digest != as_held
