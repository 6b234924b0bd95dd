"""Weights as plain bytes: the same files and digests as with torch."""

import json
import resource
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.model.safetensors_files import file_order, raw_digest, read_raw, write_blocks
from lachesis.pipeline.model.tensors import weights_digest
from lachesis.schemas.errors import DataError


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
    assert raw_digest(theirs).whole == weights_digest(tensors)
    forms = file_order(theirs.forms.values())
    blocks = (theirs.data[form.name] for form in forms)
    digest = write_blocks(tmp_path / "ours.safetensors", forms, blocks, lambda _: theirs.metadata)
    assert digest == raw_digest(theirs)
    found = load_file(tmp_path / "ours.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert read_raw(tmp_path / "ours.safetensors").metadata == {"policy_version": "1-a-b"}


def test_no_file_and_a_torn_one(tmp_path, tensors):
    path = tmp_path / "w.safetensors"
    with pytest.raises(NotFoundError):
        read_raw(path)
    save_file(tensors, path)
    last = list(read_raw(path).forms)[-1]
    said = f"weights file {path} cannot be read: it is cut off and lacks bytes of {last}."
    whole = path.read_bytes()
    for torn in (b"", whole[:4], whole[:40], b"\xff" * 64):
        path.write_bytes(torn)
        with pytest.raises(DataError, match=f"weights file {path} cannot be read"):
            read_raw(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=said):
        read_raw(path)
    path.write_bytes(whole[:40])
    with pytest.raises(DataError, match=f"^weights file {path} cannot be read: it is cut off within its header.$"):
        read_raw(path)


def test_a_file_that_this_process_cannot_open_for_now_is_no_bad_one(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(InfrastructureError, match="Too many open files"):
            read_raw(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "header",
    [
        {"__metadata__": {"digests": 5}},
        {"__metadata__": {"policy_version": None}},
        {"__metadata__": {"digests": "\ud800"}},
        {"\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}},
        {"a": {"dtype": ["F32"], "shape": [0], "data_offsets": [0, 0]}},
        {"a": {"dtype": "F32", "shape": ["0"], "data_offsets": [0, 0]}},
        {"a": 1},
        [],
    ],
)
def test_a_header_that_no_file_has(tmp_path, header):
    path, text = tmp_path / "w.safetensors", json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(DataError, match=f"weights file {path} cannot be read"):
        read_raw(path)
