"""Draws the next token of each row, on a GPU by one CUDA graph for each number of rows.

Guarantees what `sampling.draw` gives: it is what is recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lachesis.pipeline.inference.graphed_call import GraphedCall, GraphPool, bucket
from lachesis.pipeline.inference.sampling import Draw, RowSettings, draw

__all__ = ["TokenSampler"]


class _Sized(NamedTuple):
    """`logits` [B,V] and `values` [B,3] are what the call reads."""

    call: GraphedCall
    logits: torch.Tensor
    values: torch.Tensor


class TokenSampler:
    """Draws for rows whose logits are on one device. `pool`: of the graphs; one that records none makes plain calls."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._sized: dict[tuple[int, int, bool], _Sized] = {}

    def __call__(self, logits_BV: torch.Tensor, settings: RowSettings) -> Draw:
        """Return the draw, which holds until the next one."""
        rows, vocabulary = logits_BV.shape
        if not self._pool.records:
            return draw(logits_BV, settings.values.to(logits_BV.device), has_nucleus=settings.has_nucleus)
        size = (bucket(rows), vocabulary, settings.has_nucleus)
        if size not in self._sized:
            self._sized[size] = self._make(*size)
        sized = self._sized[size]
        sized.logits[:rows] = logits_BV
        sized.values.copy_(settings.padded(size[0]).values)
        found: Draw = sized.call()
        return Draw(found.logprobs[:rows], found.drawn[:, :rows])

    def _make(self, rows: int, vocabulary: int, has_nucleus: bool) -> _Sized:
        logits_BV = torch.zeros(rows, vocabulary, device=self._pool.device)
        values_B3 = torch.zeros(rows, 3, dtype=torch.float64, device=self._pool.device)
        call = GraphedCall(self._pool, lambda: draw(logits_BV, values_B3, has_nucleus=has_nucleus))
        return _Sized(call, logits_BV, values_B3)
