"""Draws the next token of each row, on a GPU by one CUDA graph for each number of rows.

Guarantees the results of `next_token.draw`: the graphs record that function.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lachesis.pipeline.inference.engines.reference.graphed_call import MEMORY_GROWTH, GraphedCall, GraphPool, bucket
from lachesis.pipeline.inference.engines.reference.next_token import Draw, RowSettings, draw

__all__ = ["TokenSampler"]


class _Sized(NamedTuple):
    """`values` [B,3] are read by the call beside the logits."""

    call: GraphedCall
    values: torch.Tensor


class TokenSampler:
    """Draws for rows whose logits are on one device. `pool`: of the graphs; one that records none makes plain calls."""

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._logits = self._logprobs = torch.zeros(0, 0)  # [rows, V], of the newest draw whatever its size
        self._sized: dict[tuple[int, bool], _Sized] = {}

    def __call__(self, logits_BV: torch.Tensor, settings: RowSettings) -> Draw:
        """Return the draw, which holds until the next one."""
        rows, vocabulary = logits_BV.shape
        if not self._pool.records:
            return draw(logits_BV, settings.values.to(logits_BV.device), has_nucleus=settings.has_nucleus)
        size = (bucket(rows), settings.has_nucleus)
        self._reserve(size[0], vocabulary)
        if size not in self._sized:
            self._sized[size] = self._make(*size)
        sized = self._sized[size]
        self._logits[:rows] = logits_BV
        sized.values.copy_(settings.padded(size[0]).values)
        found: Draw = sized.call()
        return Draw(found.logprobs[:rows], found.drawn[:, :rows])

    def _reserve(self, rows: int, vocabulary: int) -> None:
        """Have memory for the logits and logprobs of so many rows: each graph would keep its own."""
        had, width = self._logits.shape
        if rows > had or vocabulary != width:
            self._sized.clear()
            self._logits = self._logprobs = torch.zeros(0, 0)
            self._logits, self._logprobs = torch.zeros(
                2, max(rows, int(MEMORY_GROWTH * had)), vocabulary, device=self._pool.device
            )

    def _make(self, rows: int, has_nucleus: bool) -> _Sized:
        logits_BV, logprobs_BV = self._logits[:rows], self._logprobs[:rows]
        values_B3 = torch.zeros(rows, 3, dtype=torch.float64, device=self._pool.device)

        def call() -> Draw:
            found = draw(logits_BV, values_B3, has_nucleus=has_nucleus)
            return Draw(logprobs_BV.copy_(found.logprobs), found.drawn)

        return _Sized(GraphedCall(self._pool, call), values_B3)
