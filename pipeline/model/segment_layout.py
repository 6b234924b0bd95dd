"""Places the tensors of a policy in shared memory, for trainer and vLLM to compute with.

vLLM computes queries, keys and values by one matrix that holds their rows one after the other, and gate and up in the
same way. It pads embedding and output head to a multiple of 64 rows. So tensors that it joins lie side by side here, in
its order, and those of the vocabulary have zeros behind them. A server checks all this against its own loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

__all__ = ["JOINED", "SegmentTensor", "place_tensors", "rope_of"]

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that vLLM makes one of, in the order of their rows."""
_ALIGNMENT = 64
"""Bytes, and rows of the vocabulary."""


class SegmentTensor(msgspec.Struct, frozen=True):
    """A tensor in a segment. `offset`, bytes: from the first one; `reserved`, bytes: with what pads it behind."""

    name: str
    dtype: str
    shape: list[int]
    offset: int
    reserved: int


def place_tensors(tensors: Mapping[str, torch.Tensor], vocabulary: int) -> tuple[list[SegmentTensor], int]:
    """Return the place of each tensor, and the bytes that all of them take."""
    places, end, last = [], 0, None
    for name in sorted(tensors, key=_order):
        tensor, joined = tensors[name], _order(name)[0]
        if joined != last:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        reserved = tensor.nbytes
        if joined == name and tensor.ndim == 2 and tensor.shape[0] == vocabulary:
            reserved = -(-vocabulary // _ALIGNMENT) * _ALIGNMENT * tensor[0].nbytes
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(SegmentTensor(name, dtype, list(tensor.shape), end, reserved))
        end, last = end + reserved, joined
    return places, end


def rope_of(config: Any) -> dict[str, Any]:
    """Return the settings of a model's rotary embedding: base frequency, and how it is scaled."""
    found = getattr(config, "rope_parameters", None) or {}
    return {name: value for name, value in sorted(found.items()) if value is not None}


def _order(name: str) -> tuple[str, int]:
    """Return what the tensor is joined with, and its place there; without that, itself."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        for modules in JOINED:
            if part in modules:
                return ".".join([*parts[:index], "+".join(modules), *parts[index + 1 :]]), modules.index(part)
    return name, 0
