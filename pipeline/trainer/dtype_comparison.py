"""Computes the loss of recorded sequences in float32 and bfloat16, on one model."""

import torch

from lachesis.pipeline.model.logprobs import SampledLogprobs
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.loss import loss_denominator, policy_loss
from lachesis.pipeline.trainer.packed_batch import PackedBatch

__all__ = ["losses"]


def losses(policy: PolicyModel, batch: PackedBatch, config: LearnerConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Return loss and gradient norm of `batch` by dtype. The model is left in float32, without gradients."""
    found: dict[str, float] = {}
    norms: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model = policy.model.float()
        logprobs_BT, entropy_BT = SampledLogprobs(model, dtype)(batch.tokens_BT, config.temperature, batch.mask_BT)
        output = policy_loss(
            logprobs_BT, entropy_BT, batch, config.loss, denominator=loss_denominator(batch, config.loss)
        )
        output.loss.backward()  # type: ignore[no-untyped-call]
        found[name] = float(output.loss.item())
        norms[name] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        model.zero_grad(set_to_none=True)
    return found, norms
