"""Exchanging a model's tensors: what is taken as it is, what is copied, and that every holder sees the new values."""

import pytest
import torch

from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.replace_tensors import CheckedTensors
from lachesis.pipeline.model.tensors import load_tensors, policy_tensors
from lachesis.pipeline.model.weight_files import read_weights, write_new_weights
from lachesis.schemas.errors import DataError


class Layer(torch.nn.Module):
    """A layer whose weight can be held in further ways."""

    def __init__(self, kind):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.other = torch.nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("scale", torch.zeros(4))
        if kind == "tied by another parameter":
            self.other = torch.nn.Parameter(self.weight.data)
        elif kind == "a view kept":
            self.turned = self.weight.detach().t()
        elif kind == "views kept in a list":
            self.kept = {"rows": [self.weight.detach()[1:3]]}
        elif kind == "one parameter within another":
            self.other = torch.nn.Parameter(self.weight.data[:2])
        elif kind == "the parameter in a list":
            self.kept = [self.weight]
        elif kind == "a view as a buffer that is not stored":
            self.register_buffer("turned", self.weight.detach().t(), persistent=False)
        elif kind == "not contiguous":
            self.weight = torch.nn.Parameter(torch.zeros(4, 4).t())

    def seen(self):
        """Return the sum of everything that a pass could read of `weight`."""
        kept = getattr(self, "kept", None)
        parts = {"weight": self.weight, "turned": getattr(self, "turned", None)}
        parts |= {"kept": kept["rows"][0] if isinstance(kept, dict) else kept[0] if kept else None}
        return {name: part.unique().tolist() for name, part in parts.items() if part is not None}


KINDS = [
    "plain", "tied by another parameter", "a view kept", "views kept in a list", "one parameter within another",
    "the parameter in a list", "not contiguous", "a view as a buffer that is not stored",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inference", [True, False])
def test_every_holder_of_a_tensor_sees_the_new_values(kind, inference):
    layer = Layer(kind)
    for value in (1.0, 2.0):
        names = policy_tensors(layer)
        with torch.inference_mode(inference):
            load_tensors(layer, CheckedTensors({name: torch.full(one.shape, value) for name, one in names.items()}))
        assert all(values == [value] for values in layer.seen().values())
        assert all(one.unique().tolist() == [value] for one in layer.state_dict().values())


def test_checked_tensors_become_the_models_own_and_others_are_copied():
    layer = Layer("plain")
    given = {name: torch.ones_like(one) for name, one in policy_tensors(layer).items()}
    load_tensors(layer, given)
    assert {one.data_ptr() for one in given.values()}.isdisjoint(one.data_ptr() for one in layer.state_dict().values())
    load_tensors(layer, CheckedTensors(given))
    assert {one.data_ptr() for one in given.values()} == {one.data_ptr() for one in layer.state_dict().values()}
    load_tensors(layer, CheckedTensors({name: torch.full_like(one, 3) for name, one in given.items()}))
    assert all(one.unique().tolist() == [1] for one in given.values()), "the weights before were written over"


def test_nothing_changes_where_one_does_not_fit():
    layer = Layer("plain")
    given = CheckedTensors({name: torch.ones_like(one) for name, one in policy_tensors(layer).items()})
    given["weight"] = torch.ones(3, 4)
    with pytest.raises(DataError, match=r"weight is float32\[3, 4\], expected float32\[4, 4\]"):
        load_tensors(layer, given)
    with pytest.raises(DataError, match="not finite: other"):
        load_tensors(layer, dict(given) | {"weight": torch.ones(4, 4), "other": torch.full((4, 4), torch.nan)})
    assert all(one.unique().tolist() == [0] for one in layer.state_dict().values())


def test_a_models_logits_are_the_same_bits_whichever_way_its_weights_came(tmp_path):
    trained, one, other = (build_tiny_policy(seed, width=32, layers=2, max_length=32).model for seed in range(3))
    version, path = write_new_weights(policy_tensors(trained), tmp_path, 1, "a")
    found = read_weights(path, version, policy_tensors(one))
    taken = found["model.embed_tokens.weight" if "model.embed_tokens.weight" in found else "lm_head.weight"]
    load_tensors(other, dict(found))
    load_tensors(one, found)
    assert one.lm_head.weight.data_ptr() == one.model.embed_tokens.weight.data_ptr() == taken.data_ptr()
    tokens = torch.randint(0, 20, (3, 17))
    with torch.no_grad():
        right = trained(tokens).logits
        assert torch.equal(one(tokens).logits, right)
        assert torch.equal(other(tokens).logits, right)
