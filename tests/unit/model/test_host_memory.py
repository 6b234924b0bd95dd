"""Copies of tensors: what they hold while the tensors go on changing."""

import pytest
import torch

from lachesis.pipeline.model.host_memory import HostCopies
from lachesis.pipeline.model.tensors import rounded


def tensors(value=1.0):
    return {
        "w": torch.full((3, 5), value).t(),
        "b": torch.full((), value / 3),
        "n": torch.arange(4),
        "e": torch.zeros(0, 2),
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_stays_as_it_was(dtype):
    held = tensors()
    copied = HostCopies().copy(held, dtype)
    expected = {name: tensor.clone() for name, tensor in rounded(held, dtype).items()}
    for tensor in held.values():
        tensor.add_(1)
    assert_equal(copied, expected)


def test_memory_is_used_again_after_as_many_copies_as_there_are_slots():
    copies = HostCopies(2)
    first = copies.copy(tensors(1.0))
    second = copies.copy(tensors(2.0))
    assert_equal(first, tensors(1.0))
    third = copies.copy(tensors(3.0))
    assert third["w"].data_ptr() == first["w"].data_ptr() != second["w"].data_ptr()
    assert_equal(second, tensors(2.0))
    assert_equal(third, tensors(3.0))


def test_other_forms_get_other_memory():
    copies = HostCopies()
    copies.copy(tensors())
    other = {"w": torch.ones(7), "n": torch.arange(4, dtype=torch.int32)}
    assert_equal(copies.copy(other), other)
    assert_equal(copies.copy(other, "bfloat16"), rounded(other, "bfloat16"))
