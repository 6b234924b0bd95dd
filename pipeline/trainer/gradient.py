"""Holds the results of the passes over a batch: on the device, and as the gradient of all ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lachesis.pipeline.trainer.loss import LossSums
from lachesis.pipeline.trainer.step_size import StepProbe

__all__ = ["BatchGradient", "BatchPasses"]


class BatchGradient(NamedTuple):
    """The result of one backward pass: `norm` before clipping; `probe`: rows to measure the step on; `padding` the
    share of the tokens computed that were none; `shared` the share of the tokens that were computed with another row's.
    All but the probe are over all ranks."""

    loss: float
    norm: float
    sums: LossSums
    mismatches: list[list[float]]
    """Of each row of this rank's batch: see `mismatch_sums`."""
    probe: StepProbe | None
    padding: float
    shared: float
    sequences: int
    tokens: int
    trainable_tokens: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class BatchPasses(NamedTuple):
    """The results of a batch's forward and backward passes, on its device: the loss (float64), `LossSums` in a row,
    `mismatch_sums` of each row, and the logprobs [B,T] before the step; `padded` tokens were computed."""

    loss: torch.Tensor
    totals: torch.Tensor
    mismatches_BS: torch.Tensor
    before_BT: torch.Tensor
    padded: int
