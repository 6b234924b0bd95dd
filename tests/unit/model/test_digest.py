"""Digests of weights, and the passes that write, copy and check at once, over several pieces."""

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from lachesis.pipeline.model import digest as module
from lachesis.pipeline.model.digest import DIGEST_LENGTH, PIECE_BYTES
from lachesis.pipeline.model.safetensors_files import is_finite, raw_digest, read_raw
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
        digests += blake3(label + b"".join(blake3(piece).digest() for piece in pieces)).digest()
    return "k" + blake3(digests).hexdigest()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_digest_is_as_it_is_described(tensors, monkeypatch, threads):
    monkeypatch.setattr(module, "_threads", lambda: threads)
    few = {"b": torch.ones(2), "a": torch.arange(3)}
    for given in (tensors, few, {}):
        assert weights_digest(given) == digest_by_hand(given)


def test_a_version_names_its_form(tensors):
    version = policy_version(3, "a", tensors)
    assert (len(version.digest), version.digest[0]) == (DIGEST_LENGTH, "k")
    assert PolicyVersion.parse(str(version)) == version
    assert matches(tensors, version)
    assert not matches(tensors, PolicyVersion(3, "a", version.digest[1:]))
    assert not matches(tensors, PolicyVersion(3, "a", "t" + version.digest[1:]))
    assert not matches(tensors, PolicyVersion(3, "a", ""))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_is_digested_as_it_is_written_and_checked_as_it_is_copied(tensors, tmp_path, dtype):
    sent = rounded(tensors, dtype)
    version, path = write_new_weights(sent, tmp_path, 3, "a", dtype)
    assert version == policy_version(3, "a", sent)
    assert path == weights_path(tmp_path, version)
    assert raw_digest(read_raw(path)).whole == weights_digest(sent)
    stored, found = load_file(path), read_weights(path, version, tensors)
    assert found.keys() == stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(stored[name], sent[name])
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], sent[name].to(tensor.dtype))
    assert write_weights(sent, tmp_path, version, dtype) == path
    path.write_bytes(bytes(path.stat().st_size))  # what was read is a copy
    assert torch.equal(found["large"], sent["large"].float())


def test_tensors_that_a_model_holds_in_bfloat16_stay_as_they_travelled(tensors, tmp_path):
    sent = rounded(tensors, "bfloat16")
    version = policy_version(3, "a", sent)
    path = write_weights(sent, tmp_path, version, "bfloat16")
    found = read_weights(path, version, tensors, {"large"})
    assert found["large"].dtype == torch.bfloat16
    for name, tensor in tensors.items():
        assert torch.equal(found[name].to(tensor.dtype), sent[name].to(tensor.dtype))
        assert name == "large" or found[name].dtype == tensor.dtype
    with pytest.raises(DataError, match="1 missing: other"):
        read_weights(path, version, tensors | {"other": torch.zeros(1)}, {"large", "other"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_without_the_digests_of_its_tensors_is_refused(tensors, tmp_path, dtype):
    sent = rounded(tensors, dtype)
    version, path = policy_version(3, "a", sent), tmp_path / "bare.safetensors"
    labels = {"policy_version": str(version)} | ({"rounded_to": dtype} if dtype == "bfloat16" else {})
    save_file(sent, path, metadata=labels)
    with pytest.raises(DataError, match="was altered: its header"):
        read_weights(path, version, tensors)


def test_weights_are_not_written_under_the_version_of_others(tensors, tmp_path):
    others = policy_version(3, "a", tensors | {"small": torch.arange(5) + 1})
    for version in (others, PolicyVersion(3, "a", others.digest[1:]), PolicyVersion(3, "a", "")):
        with pytest.raises(DataError, match="another digest"):
            write_weights(tensors, tmp_path, version)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_bit_and_a_single_value_are_noticed_wherever_they_lie(tensors, tmp_path, dtype):
    sent = rounded(tensors, dtype)
    version, path = write_new_weights(sent, tmp_path, 3, "a", dtype)
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


def test_the_error_names_the_file_and_the_tensors_that_were_altered(tensors, tmp_path):
    version, path = write_new_weights(tensors, tmp_path, 3, "a")
    file, whole = read_raw(path), path.read_bytes()
    starts = {name: whole.index(data.tobytes()) for name, data in file.data.items() if data.size}
    for names in (["large"], ["small"], ["half", "whole"], sorted(starts)):
        altered = bytearray(whole)
        for name in names:
            altered[starts[name] + file.data[name].size - 1] ^= 0x40  # in floats a bit of the exponent
        path.write_bytes(altered)
        said = rf"{path}: its tensors have digest .* {version} .*: the file is damaged in {', '.join(names)}\."
        with pytest.raises(DataError, match=said):
            read_weights(path, version, tensors)


@pytest.mark.slow
def test_every_byte_of_a_file_counts(tmp_path):
    few = {"b": torch.ones(2), "a": torch.arange(3), "c": torch.ones(3).bfloat16()}
    version, path = write_new_weights(few, tmp_path, 3, "a", "bfloat16")
    whole = path.read_bytes()
    for at, byte in enumerate(whole):
        for other in {byte ^ 1, byte ^ 0x20, ord("\n"), 0} - {byte}:
            path.write_bytes(whole[:at] + bytes([other]) + whole[at + 1 :])
            with pytest.raises(DataError, match=str(path)):
                read_weights(path, version, few)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="was altered: its header, or what follows its tensors"):
        read_weights(path, version, few)
    path.write_bytes(whole)
    read_weights(path, version, few)


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
