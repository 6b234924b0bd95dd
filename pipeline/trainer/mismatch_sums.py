"""Sums up how far the policy's logprobs are from the rollout's, for each row of a batch.

Guarantees that the sums of rows add up to those of `LossSums`, whatever micro-batches they were computed in.
"""

from __future__ import annotations

import torch

from lachesis.pipeline.trainer.loss import LOG_RATIO_LIMIT
from lachesis.pipeline.trainer.packed_batch import PackedBatch

__all__ = ["MISMATCH_SUMS", "mismatch_sums"]

MISMATCH_SUMS = 5
"""Sums of each row."""


def mismatch_sums(logprobs_BT: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return the sums of each row over its trainable tokens, float64 [B,5].

    They are the number of tokens and, with w = p_train / p_rollout, the sums of -ln w, w - 1 - ln w, w and w^2.
    """
    mask_BT = batch.mask_BT
    log_w_BT = torch.where(mask_BT, logprobs_BT.detach() - batch.logprobs_BT, 0.0)
    log_w_BT = log_w_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).double()
    w_BT = log_w_BT.exp()
    k3_BT = w_BT - 1 - log_w_BT  # 0 off the mask
    w_BT = torch.where(mask_BT, w_BT, 0.0)
    sums = (mask_BT.double(), -log_w_BT, k3_BT, w_BT, w_BT**2)
    return torch.stack([values_BT.sum(1) for values_BT in sums], dim=1)
