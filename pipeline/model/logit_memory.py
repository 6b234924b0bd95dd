"""Decides how many logits are computed at once on a device, and whether they stay in memory.

Pure, except for `DeviceMemory.now`. The size of a slice depends on the device alone, so that a step repeats to the bit
on the same device. Whether slices are kept or computed a second time depends on free memory, and changes no bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lachesis.pipeline.model.free_memory import free_bytes

__all__ = ["CPU_KEPT_BYTES", "CPU_SLICE_BYTES", "DeviceMemory", "keeps_logits", "slice_bytes"]

CPU_SLICE_BYTES = 1 << 28
"""Float32 logits of one slice on a CPU, bytes. The backward pass of a slice holds about four times as much."""
CPU_KEPT_BYTES = 1 << 30
"""Float32 logits of a micro-batch that are kept for the backward pass on a CPU, bytes, whatever is free: other services
share its memory."""
_GPU_SLICES = 64
"""A slice takes at most this part of a GPU's memory, rounded down to a power of two: 1 GiB of 80 GB, so that a matrix
product of a vocabulary of 152,000 has 3,500 rows in bfloat16. Other sizes were not measured."""
_GPU_MAX_SLICE_BYTES = 1 << 31
_SLICE_COPIES = 4
"""Copies of its logits that a slice's backward pass holds at once."""
_GPU_MARGIN = 16
"""This part of a GPU's memory stays free for what the backward pass of the layers takes."""


class DeviceMemory(NamedTuple):
    """A device as these decisions see it. `total` and `free` are bytes; 0 on a CPU, where they do not count."""

    kind: str
    total: int = 0
    free: int = 0

    @classmethod
    def now(cls, device: torch.device) -> DeviceMemory:
        """Return that of `device` at this moment."""
        if device.type != "cuda":
            return cls(device.type)
        return cls("cuda", torch.cuda.get_device_properties(device).total_memory, free_bytes(device) or 0)


def slice_bytes(memory: DeviceMemory) -> int:
    """Return how many bytes of float32 logits are computed at once on a device."""
    if memory.kind != "cuda":
        return CPU_SLICE_BYTES
    part = memory.total // _GPU_SLICES
    return max(CPU_SLICE_BYTES, min(_GPU_MAX_SLICE_BYTES, 1 << max(0, part.bit_length() - 1)))


def keeps_logits(memory: DeviceMemory, logits: int, one_slice: int, gradients: int) -> bool:
    """Return whether a micro-batch's logits stay in memory for the backward pass.

    `logits` and `one_slice` are their bytes in float32, `gradients` the bytes of those that this pass has to allocate.
    """
    if memory.kind != "cuda":
        return logits <= CPU_KEPT_BYTES
    return logits + _SLICE_COPIES * one_slice + gradients + memory.total // _GPU_MARGIN <= memory.free
