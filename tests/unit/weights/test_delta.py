"""Coding of weights: lossless for any bytes, smaller for a small step, and what is damaged is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lachesis.pipeline.weights import delta
from lachesis.pipeline.weights.delta import decode_blocks, encode_blocks
from lachesis.pipeline.weights.payload import decode_payload, encode_payload, forms_of
from lachesis.pipeline.weights.upload import raw_tensors
from lachesis.schemas.errors import DataError


@st.composite
def pairs(draw):
    """Bytes, a base of the same length or none, and a size of elements that divides it."""
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    size = itemsize * draw(st.integers(0, 40))
    make = st.binary(min_size=size, max_size=size).map(lambda data: np.frombuffer(data, np.uint8))
    return draw(make), draw(st.none() | make), itemsize


@given(pairs())
def test_any_bytes_come_back_whatever_the_base(pair):
    data, base, itemsize = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK_BYTES", 64)
        coded = memoryview(b"".join(encode_blocks(data, base, itemsize)))
        found = b"".join(block.tobytes() for block in decode_blocks(coded, 0, len(data), base, itemsize))
    assert found == data.tobytes()


def model(seed=0, elements=200_000):
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(elements) * 0.02,
        "half": torch.randn(7, 3).bfloat16(),
        "steps": torch.arange(5),
        "empty": torch.zeros(0, 4),
        "one": torch.tensor(3.5),
    }


def after_a_step(tensors, size):
    return {n: t + (size * torch.sign(torch.randn(t.shape))).to(t.dtype) if t.is_floating_point() else t
            for n, t in tensors.items()}  # fmt: skip


def test_a_small_step_takes_a_part_of_the_bytes():
    before, after = raw_tensors(model()), raw_tensors(after_a_step(model(), 1e-6))
    whole = b"".join(encode_payload(after, None))
    difference = b"".join(encode_payload(after, before))
    assert len(difference) < 0.6 * len(whole) < 0.6 * after.nbytes
    found = decode_payload(memoryview(difference), before)
    forms, _ = forms_of(memoryview(difference))
    assert b"".join(block.tobytes() for block in found) == b"".join(after.data[form.name].tobytes() for form in forms)


def test_noise_takes_hardly_more_than_itself():
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    assert len(b"".join(encode_blocks(noise, None, 4))) < noise.size + 64


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data + b"x",
        lambda data: b"",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:-1000] + bytes([255] * 1000),
    ],
)
def test_what_is_damaged_is_refused(damage):
    data = damage(b"".join(encode_payload(raw_tensors(model()), None)))
    with pytest.raises(DataError):
        list(decode_payload(memoryview(data), None))


def test_a_base_of_another_shape_is_refused():
    coded = memoryview(b"".join(encode_payload(raw_tensors(model()), None)))
    with pytest.raises(DataError, match="base"):
        list(decode_payload(coded, raw_tensors(model(elements=100_000))))


def test_a_plane_that_unpacks_to_more_than_it_may_is_cut_off():
    bomb = b"".join(encode_blocks(np.zeros(1 << 20, np.uint8), None, 1))
    with pytest.raises(DataError, match="17 bytes where 16"):
        list(decode_payload(memoryview(_manifest([("a", "U8", [16])]) + bomb), None))


def _manifest(forms):
    import msgspec

    text = msgspec.msgpack.encode(forms)
    return len(text).to_bytes(4, "little") + text
