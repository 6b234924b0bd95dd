"""Decoding with keys, masks and positions at fixed addresses, so that a step can be one CUDA graph.

Rows join and leave as in `PaddedBatch`. In between, their cache lies in buffers of a few sizes, rows and tokens both
rounded up: a step writes the new token's keys into one column, the same for all rows, and attends to all columns under
a mask. A step depends on sizes alone, never on a value. A row that leaves keeps its place, unread, until half of the
places are empty.

Guarantees that logits agree with those of `PaddedBatch` up to rounding. It is for caches that keep all tokens in every
layer and are masked by one mask; layers with windows, states or shared keys are refused.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, cache_utils

from lachesis.pipeline.inference.engines.reference.decoding import PaddedBatch
from lachesis.pipeline.inference.engines.reference.graphed_call import MEMORY_GROWTH, GraphedCall, GraphPool, bucket
from lachesis.pipeline.inference.engines.reference.row_cache import (
    CachedRows,
    GrowingLayer,
    UnknownCacheError,
    stack_rows,
)

__all__ = ["StaticBatch"]

_MIN_WIDTH_TOKENS = 64
_MAX_STEPS = 48
"""Sizes whose steps are kept recorded, those used last."""
_ATTENTION = {"sdpa", "eager"}
"""Kinds of attention that take a mask of four dimensions: bool, or what is added to the scores."""


class _StaticLayer(cache_utils.DynamicLayer):  # type: ignore[misc]
    """Keys and values [row, head, token, part] in place; each token's go into the column that `column` says."""

    def hold(self, keys: torch.Tensor, values: torch.Tensor, column: torch.Tensor) -> None:
        """Take the memory of all rows."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values, self._column = keys, values, column

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Write one token of every row; return all columns."""
        self.keys.index_copy_(2, self._column, keys)
        self.values.index_copy_(2, self._column, values)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return how many tokens stand before the new one, as far as sizes show."""
        return int(self.keys.shape[-2]) - 1


class _Step(NamedTuple):
    """A step of one size. `mask` [place, column]; `given` [place, 2]: new token and position."""

    call: GraphedCall
    layers: list[_StaticLayer]
    mask: torch.Tensor
    given: torch.Tensor
    column: torch.Tensor


class StaticBatch(PaddedBatch):
    """One cache for all rows at fixed addresses; prompts are padded and read together."""

    about = "all rows together, a step as one CUDA graph"

    def __init__(self, model: Any, pool: GraphPool) -> None:
        """Raise `UnknownCacheError` where the model's layers do not all keep all tokens."""
        kinds = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers} - {"DynamicLayer"}
        if kinds:
            raise UnknownCacheError(f"cache layers of the kind {min(kinds)} have no fixed addresses here")
        attention = getattr(model.config, "_attn_implementation", None)
        if attention not in _ATTENTION:
            raise UnknownCacheError(f"attention of the kind {attention} is given no mask of four dimensions here")
        self._masks_by_bool = attention == "sdpa"
        self._pool = pool
        self._places: list[int] = []  # of the rows in a step's buffers
        self._tokens: list[int] = []  # that each row has
        self._places_on_device = torch.zeros(0, dtype=torch.long)
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []  # each layer's keys and values, flat, for all sizes
        self._logits_memory = torch.zeros(0, 0)  # [places, V], of the newest step whatever its size
        self._steps: OrderedDict[tuple[int, int], _Step] = OrderedDict()
        super().__init__(model)
        self._dtype = next(model.parameters()).dtype

    def clear(self) -> None:
        """See `DecodingBatch`."""
        super().clear()
        self._leave_buffers()

    def prefill(self, sequences: Sequence[Sequence[int]], copies: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        self._leave_step(range(len(self._places)))
        super().prefill(sequences, copies)

    def select_rows(self, rows: Sequence[int]) -> None:
        """See `DecodingBatch`. Places of rows that leave stay empty while more than half of all are taken."""
        if self._step is None or not rows:
            super().select_rows(rows)
        elif 2 * len(rows) > len(self._step.mask) and list(rows) == sorted(set(rows)):
            self.logits = self.logits[self._tensor(rows)]
            self._take_places([self._places[row] for row in rows], [self._tokens[row] for row in rows])
        else:
            self._leave_step(rows)

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """See `DecodingBatch`."""
        step = self._step
        if step is None or self._end == step.mask.shape[1]:
            self._leave_step(range(len(self._places)))
            step = self._enter_step()
        given = [[0, 0]] * len(step.mask)
        for place, token, position in zip(self._places, tokens, self._tokens, strict=True):
            given[place] = [token, position]
        step.given.copy_(torch.tensor(given))
        step.column.fill_(self._end)
        logits_RV = step.call()
        self.logits = logits_RV[self._places_on_device]  # a copy: the next step fills the same memory
        self._tokens = [count + 1 for count in self._tokens]
        self._end += 1

    def _take_places(self, places: list[int], tokens: list[int]) -> None:
        self._places, self._tokens = places, tokens
        self._places_on_device = self._tensor(places)

    def _leave_buffers(self) -> None:
        self._step: _Step | None = None
        self._end = 0  # columns of the step that are filled
        self._take_places([], [])

    def _enter_step(self) -> _Step:
        """Move all rows into the buffers of the smallest size that holds them and their next token."""
        rows, width = self._mask.shape
        layers = self._cache.layers
        step = self._sized(bucket(rows), bucket(width + 1, _MIN_WIDTH_TOKENS), layers)
        for layer, static in zip(layers, step.layers, strict=True):
            static.keys[:rows, :, :width] = layer.keys
            static.values[:rows, :, :width] = layer.values
        step.mask.zero_()
        step.mask[:rows, :width] = self._mask.bool()
        self._take_places(list(range(rows)), self._lengths[:, 0].tolist())
        self._step, self._end, self._cache = step, width, None
        return step

    def _leave_step(self, rows: Sequence[int]) -> None:
        """Move the given rows, in the given order, out of the buffers; keep as many columns as they need."""
        if self._step is None:
            return
        index = self._tensor([self._places[row] for row in rows])
        tokens = [self._tokens[row] for row in rows]
        width = max(tokens)
        cache = DynamicCache()
        for static in self._step.layers:
            layer = GrowingLayer()
            layer.lazy_initialization(static.keys, static.values)
            layer.hold(static.keys[:, :, : self._end], static.values[:, :, : self._end], self._end)
            cache.layers.append(layer)
        self._cache = stack_rows([CachedRows(cache, index)], width)
        self._mask = self._step.mask[index, self._end - width : self._end].long()
        self._lengths = self._tensor(tokens)[:, None]
        self.logits = self.logits[self._tensor(list(rows))]
        self._leave_buffers()

    def _sized(self, rows: int, width: int, layers: Sequence[Any]) -> _Step:
        """Return the step of a size, which is made where there is none."""
        self._reserve([(rows * width * layer.keys[0, :, 0].numel(), rows * width * layer.values[0, :, 0].numel())
                       for layer in layers], layers)  # fmt: skip
        self._reserve_logits(rows, self.logits.shape[1])
        step = self._steps.get((rows, width))
        if step is None:
            step = self._steps[rows, width] = self._make_step(rows, width, layers)
        self._steps.move_to_end((rows, width))
        while len(self._steps) > _MAX_STEPS:
            self._steps.popitem(last=False)
        return step

    def _reserve(self, sizes: Sequence[tuple[int, int]], layers: Sequence[Any]) -> None:
        """Allocate so many elements of each layer's keys and values: zeros, since masked ones are read too."""
        if len(self._memory) == len(sizes) and all(
            size <= held.numel() for pair, own in zip(sizes, self._memory, strict=True)
            for size, held in zip(pair, own, strict=True)
        ):  # fmt: skip
            return
        had = self._memory[0][0].numel() if self._memory else 0
        growth = max(1.0, MEMORY_GROWTH * had / sizes[0][0])
        self._steps.clear()  # their graphs know the old addresses
        self._memory = []
        self._memory = [
            (layer.keys.new_zeros(int(keys * growth)), layer.values.new_zeros(int(values * growth)))
            for (keys, values), layer in zip(sizes, layers, strict=True)
        ]

    def _reserve_logits(self, rows: int, vocabulary: int) -> None:
        """Have memory for the logits of so many rows: each graph would keep its own."""
        had, width = self._logits_memory.shape
        if rows > had or vocabulary != width:
            self._steps.clear()
            self._logits_memory = torch.zeros(0, 0)
            self._logits_memory = self.logits.new_zeros(max(rows, int(MEMORY_GROWTH * had)), vocabulary)

    def _make_step(self, rows: int, width: int, layers: Sequence[Any]) -> _Step:
        column = torch.zeros(1, dtype=torch.long, device=self.device)
        given_R2 = torch.zeros(rows, 2, dtype=torch.long, device=self.device)
        mask_RW = torch.zeros(rows, width, dtype=torch.bool, device=self.device)
        logits_RV = self._logits_memory[:rows]
        cache = DynamicCache()
        for layer, memory in zip(layers, self._memory, strict=True):
            shapes = [(rows, one.shape[1], width, one.shape[3]) for one in (layer.keys, layer.values)]
            keys, values = (one[: math.prod(shape)].view(shape) for one, shape in zip(memory, shapes, strict=True))
            static = _StaticLayer()
            static.hold(keys, values, column)
            cache.layers.append(static)
        own: list[_StaticLayer] = list(cache.layers)

        def call() -> torch.Tensor:
            mask_RW.index_fill_(1, column, value=True)
            mask_R11W = mask_RW[:, None, None]
            if not self._masks_by_bool:
                least = torch.finfo(self._dtype).min
                mask_R11W = torch.zeros_like(mask_R11W, dtype=self._dtype).masked_fill(~mask_R11W, least)
            inputs = {"attention_mask": mask_R11W, "position_ids": given_R2[:, 1:], self._cache_name: cache}
            return logits_RV.copy_(self._forward(given_R2[:, :1], use_cache=True, **inputs)[1])

        return _Step(GraphedCall(self._pool, call), own, mask_RW, given_R2, column)
