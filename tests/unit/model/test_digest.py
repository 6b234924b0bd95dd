"""Digests of weights in both forms, and the passes that write, copy and check at once, over several pieces."""

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from lachesis.pipeline.model import digest as module
from lachesis.pipeline.model.digest import DIGEST_LENGTH, PIECE_BYTES, form_of
from lachesis.pipeline.model.raw_weights import is_finite, raw_digest, read_raw
from lachesis.pipeline.model.tensors import bytes_of, matches, policy_version, rounded, weights_digest
from lachesis.pipeline.model.weight_files import read_weights, weights_path, write_new_weights, write_weights
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion


@pytest.fixture(scope="module")
def tensors():
    """Tensors of several pieces, of part of one, and of none; more in all than is digested on one thread."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(3, PIECE_BYTES // 3),
        "whole": torch.randn(PIECE_BYTES // 4),
        "half": torch.randn(PIECE_BYTES).bfloat16(),
        "small": torch.arange(5),
        "none": torch.zeros(0, 3),
    }


def digest_by_hand(tensors):
    digests = b""
    for name in sorted(tensors):
        tensor = tensors[name]
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        pieces = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
        label = f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode()
        digests += hashlib.sha256(label + b"".join(hashlib.sha256(piece).digest() for piece in pieces)).digest()
    return "t" + hashlib.sha256(digests).hexdigest()


def flat_by_hand(tensors):
    whole = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize("threads", [1, 3])
def test_both_forms_are_as_they_are_described(tensors, monkeypatch, threads):
    monkeypatch.setattr(module, "_threads", lambda: threads)
    assert weights_digest(tensors) == digest_by_hand(tensors)
    assert weights_digest(tensors, "flat") == flat_by_hand(tensors)
    few = {"b": torch.ones(2), "a": torch.arange(3)}
    assert weights_digest(few) == digest_by_hand(few)


def test_a_version_names_its_form(tensors):
    version = policy_version(3, "a", tensors)
    assert (len(version.digest), form_of(version.digest)) == (DIGEST_LENGTH, "tree")
    assert PolicyVersion.parse(str(version)) == version
    assert matches(tensors, version)
    old = PolicyVersion(3, "a", flat_by_hand(tensors)[:12])
    assert form_of(old.digest) == "flat"
    assert matches(tensors, old)
    assert not matches(tensors, PolicyVersion(3, "a", version.digest[1:]))
    assert not matches(tensors, PolicyVersion(3, "a", ""))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_is_digested_as_it_is_written_and_checked_as_it_is_copied(tensors, tmp_path, dtype):
    sent = rounded(tensors, dtype)
    version, path = write_new_weights(sent, tmp_path, 3, "a", dtype)
    assert version == policy_version(3, "a", sent)
    assert path == weights_path(tmp_path, version)
    assert raw_digest(read_raw(path)) == weights_digest(sent)
    stored, found = load_file(path), read_weights(path, version, tensors)
    assert found.keys() == stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], sent[name])
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], sent[name].to(tensor.dtype))
    assert write_weights(sent, tmp_path, version, dtype) == path
    path.write_bytes(bytes(path.stat().st_size))  # what was read is a copy
    assert torch.equal(found["large"], sent["large"].float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_of_the_old_form_is_read(tensors, tmp_path, dtype):
    sent = rounded(tensors, dtype)
    version = PolicyVersion(3, "a", flat_by_hand(sent)[:12])
    path = tmp_path / "old.safetensors"
    labels = {"policy_version": str(version)} | ({"rounded_to": dtype} if dtype == "bfloat16" else {})
    save_file(sent, path, metadata=labels)
    found = read_weights(path, version, tensors)
    assert all(torch.equal(found[name], sent[name].to(tensor.dtype)) for name, tensor in tensors.items())
    save_file(sent | {"small": torch.arange(5) + 1}, path, metadata=labels)
    with pytest.raises(DataError, match="have digest"):
        read_weights(path, version, tensors)


@pytest.mark.parametrize("form", ["tree", "flat"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_bit_and_a_single_value_are_noticed_wherever_they_lie(tensors, tmp_path, dtype, form):
    sent = rounded(tensors, dtype)
    version, path = write_new_weights(sent, tmp_path, 3, "a", dtype)
    if form == "flat":
        version = PolicyVersion(3, "a", flat_by_hand(sent)[:12])
        labels = {"policy_version": str(version)} | ({"rounded_to": dtype} if dtype == "bfloat16" else {})
        save_file(sent, path, metadata=labels)
    whole = path.read_bytes()
    for bit in (len(whole) - 1, len(whole) - PIECE_BYTES, len(whole) // 2):
        path.write_bytes(whole[:bit] + bytes([whole[bit] ^ 1]) + whole[bit + 1 :])
        with pytest.raises(DataError, match="have digest"):
            read_weights(path, version, tensors)
    bad = {name: tensor.clone() for name, tensor in sent.items()}
    bad["large"][-1, -1] = torch.inf
    wrong, path = write_new_weights(bad, tmp_path, 4, "a", dtype)
    with pytest.raises(DataError, match="1 with values that are not finite: large"):
        read_weights(path, wrong, tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_that_are_not_finite(dtype):
    code = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}[str(dtype).removeprefix("torch.")]
    limits = torch.finfo(dtype)
    fine = torch.tensor([limits.max, limits.min, limits.smallest_normal, 0.0, -0.0], dtype=dtype)
    assert is_finite(bytes_of(fine), code)
    for value in (torch.inf, -torch.inf, torch.nan, -torch.nan):
        assert not is_finite(bytes_of(torch.cat([fine, torch.tensor([value], dtype=dtype)])), code)
    assert is_finite(bytes_of(torch.full((2,), -1)), "I64")
    assert is_finite(bytes_of(fine[:0]), code)
