"""Weights as plain bytes: the same files and digests as with torch."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from lachesis.pipeline.model.raw_weights import file_order, raw_digest, read_raw, write_raw
from lachesis.pipeline.model.tensors import weights_digest
from lachesis.schemas.errors import DataError, NotFoundError


@pytest.fixture
def tensors():
    return {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        "n": torch.arange(3),
        "odd": torch.ones(3, dtype=torch.uint8),
        "e": torch.zeros(0, 2),
        "s": torch.tensor(1.5),
        "f": torch.tensor([True, False]),
    }


def test_what_is_written_is_what_safetensors_reads_and_has_the_same_digest(tmp_path, tensors):
    save_file(tensors, tmp_path / "theirs.safetensors", metadata={"policy_version": "1-a-b"})
    theirs = read_raw(tmp_path / "theirs.safetensors")
    assert raw_digest(theirs) == weights_digest(tensors)
    forms = file_order(theirs.forms.values())
    write_raw(tmp_path / "ours.safetensors", forms, (theirs.data[form.name] for form in forms), theirs.metadata)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert read_raw(tmp_path / "ours.safetensors").metadata == {"policy_version": "1-a-b"}


def test_no_file_and_a_torn_one(tmp_path, tensors):
    path = tmp_path / "w.safetensors"
    with pytest.raises(NotFoundError):
        read_raw(path)
    save_file(tensors, path)
    whole = path.read_bytes()
    for torn in (b"", whole[:4], whole[:40], whole[:-1], b"\xff" * 64):
        path.write_bytes(torn)
        with pytest.raises(DataError):
            read_raw(path)
