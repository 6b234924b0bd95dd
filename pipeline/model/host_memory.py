"""Allocates memory for tensors, and copies tensors into memory that later copies use again.

The owner of the tensors may change them as soon as they are copied. From a GPU they go into pinned memory, at the speed
of the bus; if they travel rounded, they are rounded before. Guarantees that a copy holds the tensors as they were when
it was made, until as many further copies are made as there are `slots`; and that pinned memory takes their bytes and no
more: torch rounds its own up to a power of two, so ordinary memory is pinned here.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lachesis.pipeline.model.digest import on_threads
from lachesis.pipeline.model.tensors import is_wide

__all__ = ["HostCopies", "allocate"]

log = logging.getLogger("lachesis")

_ALIGNMENT = 64
_PIECE_ELEMENTS = 1 << 19
"""Elements of a tensor that one thread copies at a time."""
_SPARE: deque[mmap.mmap] = deque(maxlen=2)
"""Memory that nothing uses: as much as two blocks, which the system takes where it has need of it."""


class HostCopies:
    """Memory for `slots` copies, used in turn: allocated with the first copy, and again when the forms change."""

    def __init__(self, slots: int = 1) -> None:
        self._slots: list[dict[str, torch.Tensor]] = [{} for _ in range(slots)]
        self._next = 0

    def copy(self, tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> dict[str, torch.Tensor]:
        """Return copies of the tensors, in `dtype` as `tensors.rounded` gives them."""
        rounds = dtype == "bfloat16"
        forms = {
            name: (tensor.shape, torch.bfloat16 if rounds and is_wide(tensor) else tensor.dtype)
            for name, tensor in tensors.items()
        }
        copies = self._slots[self._next]
        if {name: (copy.shape, copy.dtype) for name, copy in copies.items()} != forms:
            copies = self._slots[self._next] = {}  # what was there goes before there is as much again
            on_gpu = next((tensor for tensor in tensors.values() if tensor.is_cuda), None)
            # else CUDA would take memory of the thread's own device, which may be another
            with nullcontext() if on_gpu is None else torch.cuda.device(on_gpu.device):
                copies |= allocate(forms, pinned=on_gpu is not None)
        self._next = (self._next + 1) % len(self._slots)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.is_cuda:
                    copies[name].copy_(tensor.to(forms[name][1]), non_blocking=True)
            _copy_on_threads([(copies[name], tensor) for name, tensor in tensors.items() if not tensor.is_cuda])
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return dict(copies)


def _copy_on_threads(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, large ones in pieces.

    torch by itself takes no more threads than it computes with, of which a trainer has one for the sake of its bits.
    """
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    divides = 2 * torch.get_num_threads() <= len(os.sched_getaffinity(0))  # else torch has the cores as it is
    for copy, tensor in pairs:
        source = tensor.detach()
        if divides and source.is_contiguous():
            flat = torch.split(copy.view(-1), _PIECE_ELEMENTS), torch.split(source.view(-1), _PIECE_ELEMENTS)
            pieces += zip(*flat, strict=True)
        else:
            pieces.append((copy, source))

    def copy_one(piece: tuple[torch.Tensor, torch.Tensor]) -> None:
        piece[0].copy_(piece[1])

    on_threads(copy_one, pieces, sum(copy.nbytes for copy, _ in pairs), threads_each=torch.get_num_threads())


def allocate(
    forms: Mapping[str, tuple[Sequence[int], torch.dtype]], *, pinned: bool = False
) -> dict[str, torch.Tensor]:
    """Return tensors of these shapes and dtypes, whose values are left open, in one block of memory."""
    places, end = {}, 0
    for name, (shape, dtype) in forms.items():
        places[name] = slice(end, end + math.prod(shape) * dtype.itemsize)
        end = -(-places[name].stop // _ALIGNMENT) * _ALIGNMENT
    block = _block(max(end, _ALIGNMENT), pinned=pinned)
    return {name: block[places[name]].view(dtype).view(torch.Size(shape)) for name, (shape, dtype) in forms.items()}


def _block(size: int, *, pinned: bool) -> torch.Tensor:
    """Return memory, uint8 [size]; pinned on demand."""
    if pinned:
        try:
            return torch.from_numpy(_pinned(size))
        except RuntimeError as error:
            log.warning("%d bytes of main memory cannot be pinned, so copies from the GPU take longer: %s", size, error)
            _forget_cuda_error()
    return torch.from_numpy(_used_again(size))


def _used_again(size: int) -> NDArray[np.uint8]:
    """Return memory that was given back, or new one; it is given back once nothing uses it.

    New memory takes many times as long as a copy into it, where the system must find, clear and map its pages.
    """
    spare = next((pages for pages in list(_SPARE) if len(pages) == size and _claim(pages)), None)
    pages = spare or _new_pages(size)
    memory = np.frombuffer(pages, np.uint8)
    weakref.finalize(memory, _give_back, pages).atexit = False
    return memory


def _claim(pages: mmap.mmap) -> bool:
    """Return whether pages were spare still: another thread may have taken them."""
    try:
        _SPARE.remove(pages)
    except ValueError:
        return False
    return True


def _give_back(pages: mmap.mmap) -> None:
    """Keep pages for the next one who wants as many, and let the system have them where memory is short."""
    with suppress(OSError):  # a system that does not know it
        pages.madvise(mmap.MADV_FREE)
    _SPARE.append(pages)


def _pinned(size: int) -> NDArray[np.uint8]:
    """Return memory that is pinned until nothing uses it. Raises `RuntimeError` where that cannot be done.

    It has pages of its own: none is pinned twice.
    """
    memory = np.frombuffer(_new_pages(size), np.uint8)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.ctypes.data
    torch.cuda.check_error(cuda.cudaHostRegister(address, size, 0))
    # called just before the memory goes; of a process that ends the driver unpins it
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
    return memory


def _new_pages(size: int) -> mmap.mmap:
    """Return new memory. Raises `MemoryError` where there is none, also without the spare one."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        pages = mmap.mmap(-1, size, flags=flags)
    except OSError:  # under `ulimit -v` and strict overcommit spare memory counts
        _SPARE.clear()
        try:
            pages = mmap.mmap(-1, size, flags=flags)
        except OSError as error:
            raise MemoryError(f"{size:,} bytes of main memory cannot be had: {error}") from error
    with suppress(OSError):  # a system without
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _forget_cuda_error() -> None:
    """Let torch raise and clear the error that a call of CUDA has left: else it is taken for that of a later step."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
