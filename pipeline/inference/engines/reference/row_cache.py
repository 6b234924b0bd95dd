"""A model's own cache, as `generate` makes it, with rows that can be added, dropped and repeated.

Guarantees that appending a token copies none of the tokens before it: keys and values lie in buffers that have room.
Layers that keep a state of constant size (linear attention, convolutions, state-space models) keep theirs. Layers of
sliding windows keep every token, because the windows of rows of different lengths begin at different places; the mask
of the model still hides what lies outside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, cache_utils

__all__ = ["CachedRows", "UnknownCacheError", "keeps_states", "keeps_tokens", "new_cache", "stack_rows"]

_MIN_ROOM, _MAX_ROOM = 32, 512
"""Tokens that a new buffer has room for beyond those in it; half as many again between these."""


class UnknownCacheError(TypeError):
    """Raised when a model's cache has layers whose rows cannot be separated here."""


class _GrowingKeys:
    """Appends keys and values in place. `keys` and `values` are views of the buffers, up to the last token."""

    _buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Append to every row, and return all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if not self.keys.numel():
            self.hold(keys, values, keys.shape[-2])
        else:
            end = self.keys.shape[-2] + keys.shape[-2]
            known = self._buffers or (self.keys, self.values)
            self.hold(_append(known[0], self.keys, keys), _append(known[1], self.values, values), end)
        return self.keys, self.values

    def hold(self: Any, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        """Take these buffers, which hold `length` tokens."""
        self._buffers = keys, values
        self.keys, self.values = keys[..., :length, :], values[..., :length, :]


_HYBRID: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", cache_utils.DynamicLayer)


class GrowingLayer(_GrowingKeys, cache_utils.DynamicLayer):  # type: ignore[misc]
    """Full attention, or a sliding window."""


class GrowingHybridLayer(_GrowingKeys, _HYBRID):  # type: ignore[misc]
    """Attention beside a state of constant size."""


_GROWING = {
    "DynamicLayer": GrowingLayer,
    "DynamicSlidingWindowLayer": GrowingLayer,
    "LinearAttentionAndFullAttentionLayer": GrowingHybridLayer,
    "LinearAttentionAndSlidingWindowAttentionLayer": GrowingHybridLayer,
}
_KEPT = {"LinearAttentionLayer", "DummyLayer"}


def new_cache(model: Any) -> Any:
    """Return an empty cache with the layers that the model's configuration asks for.

    Raises `UnknownCacheError`.
    """
    cache = DynamicCache(config=model.config)
    if cache.layers:
        cache.layers = [_layer(layer) for layer in cache.layers]
    else:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def _layer(layer: Any) -> Any:
    name = type(layer).__name__
    if name in _KEPT:
        return layer
    if name not in _GROWING:
        raise UnknownCacheError(f"cache layers of the kind {name}")
    states = getattr(layer, "number_of_states", None)
    return _GROWING[name]() if states is None else _GROWING[name](number_of_states=states)


def keeps_tokens(cache: Any) -> bool:
    """Return whether some layer keeps keys and values of tokens.

    A cache whose layers come with the first pass does.
    """
    return not cache.layers or any(isinstance(layer, _GrowingKeys) for layer in cache.layers)


def keeps_states(cache: Any) -> bool:
    """Return whether some layer keeps a state of constant size, which every token that it reads changes."""
    return any(True for layer in cache.layers for _ in _states(layer))


class CachedRows(NamedTuple):
    """Rows of a cache, in the order in which they are wanted; a row may be wanted several times."""

    cache: Any
    rows: torch.Tensor


def stack_rows(parts: Sequence[CachedRows], width: int) -> Any:
    """Return a cache of the rows of all `parts`, one part after the other.

    `width`: tokens that the keys of each row are to have; shorter ones begin with zeros, of longer ones only the end is
    kept.
    """
    stacked = copy.copy(parts[0].cache)
    stacked.layers = [
        _stack_layers([part.cache.layers[index] for part in parts], [part.rows for part in parts], width)
        for index in range(len(stacked.layers))
    ]
    return stacked


def _stack_layers(layers: Sequence[Any], rows: Sequence[torch.Tensor], width: int) -> Any:
    layer = copy.copy(layers[0])
    if isinstance(layer, _GrowingKeys) and layer.keys is not None and layer.keys.numel():
        layer.hold(
            _stack_keys([one.keys for one in layers], rows, width),
            _stack_keys([one.values for one in layers], rows, width),
            width,
        )
    for name in _states(layer):
        old = [getattr(one, name) for one in layers]
        setattr(
            layer,
            name,
            {
                at: state
                if state is None
                else torch.cat([one[at][index] for one, index in zip(old, rows, strict=True)])
                for at, state in old[0].items()
            },
        )
    return layer


def _states(layer: Any) -> Iterator[str]:
    yield from (name for name in ("conv_states", "recurrent_states") if hasattr(layer, name))


def _stack_keys(tensors: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return a buffer with the keys (or values) [row, head, token, part] of all rows, aligned at their last token."""
    first = tensors[0]
    count = sum(len(index) for index in rows)
    buffer = first.new_empty(count, first.shape[1], width + _room(width), first.shape[-1])
    start = 0
    for tensor, index in zip(tensors, rows, strict=True):
        taken = tensor[..., max(0, tensor.shape[-2] - width) :, :]
        into = buffer[start : start + len(index)]
        into[..., : width - taken.shape[-2], :] = 0
        torch.index_select(taken, 0, index, out=into[..., width - taken.shape[-2] : width, :])
        start += len(index)
    return buffer


def _append(buffer: torch.Tensor, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the buffer with `new` appended; the same one if it has room."""
    length, end = held.shape[-2], held.shape[-2] + new.shape[-2]
    if end > buffer.shape[-2]:
        buffer = held.new_empty(*held.shape[:-2], end + _room(end), held.shape[-1])
        buffer[..., :length, :] = held
    buffer[..., length:end, :] = new
    return buffer


def _room(length: int) -> int:
    return min(max(_MIN_ROOM, length // 2), _MAX_ROOM)
