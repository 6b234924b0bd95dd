"""Digest, file and coverage of policy weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.model.tensors import load_tensors, policy_tensors, policy_version, weights_digest
from lachesis.pipeline.model.weight_files import prune_weights, read_weights, weights_path, write_weights
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion


def tensors():
    return {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.tensor([1, 2], dtype=torch.int64)}


@pytest.fixture
def model():
    return build_tiny_policy(0, width=32, layers=1, max_length=32).model


def rewrite(path, version, change):
    """Replace the file's tensors behind the writer's back, keeping its label."""
    content = load_file(path)
    change(content)
    save_file(content, path, metadata={"policy_version": str(version)})


def test_digest_does_not_depend_on_the_order_of_names_or_on_memory_layout():
    one = tensors()
    two = dict(reversed(one.items()))
    two["a.weight"] = one["a.weight"].t().contiguous().t()
    assert weights_digest(one) == weights_digest(two)


@given(st.sampled_from(["name", "dtype", "shape", "value", "sign of zero", "missing"]))
def test_digest_depends_on_everything_else(what):
    changed = tensors()
    if what == "name":
        changed["a.weigh"] = changed.pop("a.weight")
    elif what == "dtype":
        changed["b.bias"] = changed["b.bias"].view(torch.float64)
    elif what == "shape":
        changed["a.weight"] = changed["a.weight"].reshape(3, 2)
    elif what == "value":
        changed["a.weight"][0, 1] += 1e-6
    elif what == "sign of zero":
        changed["a.weight"][0, 0] = -0.0
    else:
        del changed["b.bias"]
    assert weights_digest(changed) != weights_digest(tensors())


def test_tied_weights_are_named_once(model):
    names = policy_tensors(model)
    assert len({tensor.data_ptr() for tensor in names.values()}) == len(names)
    assert ("lm_head.weight" in names) != ("model.embed_tokens.weight" in names)
    assert sum(t.numel() for t in names.values()) == sum(p.numel() for p in model.parameters())


def test_write_read_load_makes_another_model_equal(model, tmp_path):
    version = policy_version(7, "ab", policy_tensors(model))
    path = write_weights(policy_tensors(model), tmp_path / "new", version)
    assert path == weights_path(tmp_path / "new", version)
    assert path.name == f"7-ab-{version.digest}.safetensors"
    other = build_tiny_policy(1, width=32, layers=1, max_length=32).model
    load_tensors(other, read_weights(path, version, policy_tensors(other)))
    assert weights_digest(policy_tensors(other)) == weights_digest(policy_tensors(model))
    assert torch.equal(other.lm_head.weight, other.model.embed_tokens.weight)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop("a.weight"), "1 missing: a.weight"),
        (lambda t: t.update({"c": torch.zeros(1)}), "1 unknown: c"),
        (lambda t: t.update({"a.weight": torch.zeros(3, 2)}), r"a.weight is float32\[3, 2\], expected float32\[2, 3\]"),
        (lambda t: t.update({"a.weight": t["a.weight"].bfloat16()}), "a.weight is bfloat16"),
        (lambda t: t["a.weight"].fill_(torch.nan), "have digest"),
        (lambda t: t["a.weight"].add_(1), "have digest"),
    ],
)
def test_a_file_that_does_not_match_is_refused_by_the_tensor_names(tmp_path, change, text):
    version = policy_version(1, "a", tensors())
    path = write_weights(tensors(), tmp_path, version)
    rewrite(path, version, change)
    with pytest.raises(DataError, match=text):
        read_weights(path, version, tensors())


def test_damaged_mislabelled_and_missing_files_are_refused(tmp_path):
    version = policy_version(1, "a", tensors())
    path = write_weights(tensors(), tmp_path, version)
    with pytest.raises(DataError, match="holds policy version"):
        read_weights(path, PolicyVersion(2, "a", version.digest), tensors())
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        read_weights(path, version, tensors())
    path.unlink()
    with pytest.raises(NotFoundError, match="pruned"):
        read_weights(path, version, tensors())


def test_writer_refuses_a_version_of_other_weights(tmp_path):
    with pytest.raises(DataError, match="digest"):
        write_weights(tensors(), tmp_path, PolicyVersion(1, "a", "0" * 12))
    with pytest.raises(DataError, match="digest"):
        write_weights(tensors(), tmp_path, PolicyVersion(1, "a", ""))
    assert not list(tmp_path.iterdir())


def test_loading_is_all_or_nothing(model):
    before = weights_digest(policy_tensors(model))
    incomplete = {name: torch.zeros_like(tensor) for name, tensor in policy_tensors(model).items()}
    incomplete.popitem()
    with pytest.raises(DataError, match="1 missing"):
        load_tensors(model, incomplete)
    assert weights_digest(policy_tensors(model)) == before


def test_prune_keeps_the_newest_and_the_protected(tmp_path):
    versions = []
    for step in range(5):
        content = {"w": torch.full((2,), float(step))}
        versions.append(policy_version(step, "a", content))
        write_weights(content, tmp_path, versions[-1])
    gone = prune_weights(tmp_path, keep=2, protect=[versions[0]])
    assert [path.name for path in gone] == [f"{version}.safetensors" for version in versions[1:3]]
    assert prune_weights(tmp_path, keep=10) == []
    with pytest.raises(ValueError, match="keep"):
        prune_weights(tmp_path, keep=0)
