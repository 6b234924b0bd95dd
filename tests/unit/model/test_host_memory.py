"""Copies of tensors: what they hold while the tensors go on changing."""

import errno
import gc
import math
import mmap
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from lachesis.pipeline.model import host_memory
from lachesis.pipeline.model.host_memory import HostCopies, allocate
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_tensors_are_copied_in_pieces_whatever_their_layout(dtype, threads):
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    held = {
        "whole": torch.randn(1031, 1033, generator=generator),
        "turned": torch.randn(1033, 1031, generator=generator).t(),
        "every other": torch.randn(700_001, 2, generator=generator)[:, 0],
        "numbers": torch.arange(1_000_003),
    }
    torch.set_num_threads(threads)
    try:
        copied = HostCopies().copy(held, dtype)
    finally:
        torch.set_num_threads(before)
    assert_equal(copied, rounded(held, dtype))


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


class CudaRuntime:
    """Stands in for CUDA's runtime: it knows which memory is pinned, and no GPU."""

    def __init__(self, monkeypatch, code=0):
        self.pinned = {}
        self.code = code
        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(
            cudaHostRegister=self.register, cudaHostUnregister=self.pinned.pop,
        ))  # fmt: skip
        monkeypatch.setattr(torch.cuda, "check_error", self.check)

    def register(self, address, size, _flags):
        if not self.code:
            self.pinned[address] = size
        return self.code

    @staticmethod
    def check(code):
        if code:
            raise RuntimeError("out of memory")


FORMS = {
    "large": ((1000, 1031), torch.float32),
    "odd": ((7,), torch.uint8),
    "small": ((), torch.bfloat16),
    "none": ((0, 2), torch.float32),
}


def test_pinned_memory_takes_its_bytes_and_no_more_until_nothing_uses_it(monkeypatch):
    cuda = CudaRuntime(monkeypatch)
    found = allocate(FORMS, pinned=True)
    [(address, size)] = cuda.pinned.items()
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in FORMS.values())
    assert needed <= size <= needed + 64 * len(FORMS)
    for name, (shape, dtype) in FORMS.items():
        assert (found[name].shape, found[name].dtype) == (torch.Size(shape), dtype)
        assert address <= found[name].data_ptr() <= address + size - found[name].nbytes or not found[name].numel()
    other = allocate(FORMS, pinned=True)
    assert len(cuda.pinned) == 2
    kept = other["small"].fill_(3)
    del other, found
    gc.collect()
    [address] = cuda.pinned
    assert address <= kept.data_ptr() < address + cuda.pinned[address]
    assert kept == 3
    del kept
    gc.collect()
    assert not cuda.pinned


def test_memory_is_used_again_once_nothing_uses_it(monkeypatch):
    monkeypatch.setattr(host_memory, "_SPARE", deque(maxlen=2))
    blocks = [allocate(FORMS) for _ in range(4)]
    places = [block["large"].data_ptr() for block in blocks]
    assert len(set(places)) == 4
    kept = blocks[0]["small"].fill_(3)
    blocks[0].clear()
    other = allocate(FORMS)
    assert other["large"].data_ptr() not in places, "of the first block a tensor is still used"
    assert kept == 3
    blocks[1].clear()
    again = allocate(FORMS)
    assert again["large"].data_ptr() == places[1]
    assert allocate({"large": ((999, 1031), torch.float32)})["large"].fill_(1).sum() == 999 * 1031
    del blocks, other, again
    gc.collect()
    assert len(host_memory._SPARE) == 2


def test_spare_memory_goes_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(host_memory, "_SPARE", deque(maxlen=2))
    of_system, limit = mmap.mmap, 3 << 20
    held = weakref.WeakSet()

    def limited(descriptor, size, flags):
        if sum(map(len, held)) + size > limit:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        held.add(pages := of_system(descriptor, size, flags=flags))
        return pages

    monkeypatch.setattr(mmap, "mmap", limited)
    allocate({"first": ((2 << 20,), torch.uint8)})
    assert sum(map(len, host_memory._SPARE)) == 2 << 20
    assert allocate({"second": ((3 << 20,), torch.uint8)})["second"].fill_(1).sum() == 3 << 20
    with pytest.raises(MemoryError, match="4,194,304 bytes of main memory cannot be had"):
        allocate({"third": ((4 << 20,), torch.uint8)})


def test_threads_never_share_memory():
    def use(value):
        for _ in range(20):
            held = allocate(FORMS)["large"].fill_(value)
            assert (held == value).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(8)))


def test_memory_that_cannot_be_pinned_is_used_all_the_same(monkeypatch, caplog):
    cuda, forgotten = CudaRuntime(monkeypatch, code=2), []
    monkeypatch.setattr(host_memory, "_forget_cuda_error", lambda: forgotten.append(True))
    found = allocate(FORMS, pinned=True)
    assert found["large"].fill_(1).sum() == 1031000
    assert not cuda.pinned
    assert forgotten == [True], "the next step on the GPU would fail with this error"
    assert "bytes of main memory cannot be pinned, so copies from the GPU take longer" in caplog.text


@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_without_bytes_have_memory_as_well(monkeypatch, pinned):
    CudaRuntime(monkeypatch)
    assert allocate({}, pinned=pinned) == {}
    assert allocate({"none": ((0,), torch.float32)}, pinned=pinned)["none"].numel() == 0


@pytest.mark.gpu
def test_a_gpu_copies_into_pinned_memory():
    held = {name: tensor.cuda() for name, tensor in tensors().items()}
    copied = HostCopies().copy(held)
    assert all(copied[name].is_pinned() for name in ("w", "b", "n"))
    assert_equal({name: copy.clone() for name, copy in copied.items()}, tensors())
