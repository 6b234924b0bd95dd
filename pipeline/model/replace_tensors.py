"""Exchanges a model's tensors for others by name, without a copy where it can take them as they are.

Guarantees that every computation with a tensor of the model sees the new values: if another tensor, of the model or
kept by one of its modules, lies in a tensor's memory, the new values are copied into that memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

__all__ = ["CheckedTensors", "replace_tensors"]


class CheckedTensors(dict[str, torch.Tensor]):
    """Tensors by name, all of finite values and in memory that nothing else uses: a model may take them as its own."""


class _Place(NamedTuple):
    """Where a tensor's values lie, and how."""

    start: int
    end: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


def replace_tensors(model: Any, targets: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Give each of `targets`, tensors of `model`, the values of the one of its name in `tensors`.

    `CheckedTensors` become the model's own.
    """
    holders = _holders(model) if isinstance(tensors, CheckedTensors) else {}
    with torch.no_grad():
        for name, target in targets.items():
            new, held = tensors[name], holders.get(_place(target), [])
            if held and new.device == target.device and new.dtype == target.dtype and new.is_contiguous():
                for one in held:
                    one.data = new
            else:
                target.copy_(new)


def _holders(model: Any) -> dict[_Place, list[torch.Tensor]]:
    """Return the model's parameters and buffers by their place, without those that share memory with anything else."""
    found: dict[_Place, list[torch.Tensor]] = {}
    tensors = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        kept = (value for name, value in vars(module).items() if name not in {"_parameters", "_buffers", "_modules"})
        tensors += _tensors_in(kept, depth=2)
    for one in tensors:
        if one.device.type == "cpu" and one.layout == torch.strided and one.numel():
            found.setdefault(_place(one), []).append(one)
    shared: set[_Place] = set()
    furthest: _Place | None = None
    for place in sorted(found, key=lambda one: one.start):
        if furthest is not None and place.start < furthest.end:
            shared |= {furthest, place}
        if furthest is None or place.end > furthest.end:
            furthest = place
    return {place: held for place, held in found.items() if place not in shared and held[0].is_contiguous()}


def _tensors_in(values: Iterable[Any], *, depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth and isinstance(value, list | tuple | dict):
            yield from _tensors_in(value.values() if isinstance(value, dict) else value, depth=depth - 1)


def _place(tensor: torch.Tensor) -> _Place:
    start = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return _Place(start, start + reach * tensor.itemsize, tensor.dtype, tensor.shape, tensor.stride())
