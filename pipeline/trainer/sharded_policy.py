"""A model with weights, gradients and optimizer state spread over the ranks (FSDP2, `fully_shard`).

Guarantees that weights are gathered again for each pass, so that no pass computes with weights from before a step. Only
rank 0 holds the gathered whole; the others hold one tensor at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from lachesis.pipeline.model.logprobs import NOTHING_FURTHER, LogprobSettings, PassInputs, SampledLogprobs
from lachesis.pipeline.trainer.collectives import Ranks
from lachesis.pipeline.trainer.config import LearnerConfig
from lachesis.pipeline.trainer.logprob_settings import logprob_settings

__all__ = ["ShardedPolicy", "shard_like", "whole"]


class ShardedPolicy(nn.Module):
    """Computes logprobs as `SampledLogprobs`, with weights that are gathered for a layer at a time.

    All ranks run as many forward and backward passes. Gradients come as means over the ranks: multiply a loss that is
    to be summed by their number.
    """

    def __init__(self, model: Any, config: LearnerConfig, ranks: Ranks, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._sampled = SampledLogprobs(model, **logprob_settings(config, device.type)._asdict())
        mesh = init_device_mesh(device.type, (ranks.size,))
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh)
        # The pass goes through this module, so that its hooks gather what is in no layer: embeddings, norm and head.
        fully_shard(self, mesh=mesh, reshard_after_forward=True)
        model.to(device)  # its buffers

    @property
    def settings(self) -> LogprobSettings:
        """How logprobs are computed."""
        return self._sampled.settings

    @property
    def precision(self) -> torch.dtype:
        """That of matrix products."""
        return self._sampled.precision

    @precision.setter
    def precision(self, precision: torch.dtype) -> None:
        self._sampled.precision = precision

    def forward(
        self,
        tokens_BT: torch.Tensor,
        temperature: float,
        mask_BT: torch.Tensor | None = None,
        given: PassInputs = NOTHING_FURTHER,
        ids_BTK: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Return logprobs and entropies [B,T], and those of `ids_BTK` if given; see `SampledLogprobs`."""
        if ids_BTK is None or mask_BT is None:
            return self._sampled(tokens_BT, temperature, mask_BT, given)
        return self._sampled.with_alternatives(tokens_BT, temperature, mask_BT, ids_BTK, given)

    def with_alternatives(
        self,
        tokens_BT: torch.Tensor,
        temperature: float,
        mask_BT: torch.Tensor,
        ids_BTK: torch.Tensor,
        given: PassInputs = NOTHING_FURTHER,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `SampledLogprobs.with_alternatives`, by a pass whose hooks gather the weights."""
        logprobs_BT, entropy_BT, others_BTC = self(tokens_BT, temperature, mask_BT, given, ids_BTK)
        return logprobs_BT, entropy_BT, others_BTC


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of all ranks. A collective, for one that is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return whole values, which every rank has, in the form of `parameter`."""
    if not isinstance(parameter, DTensor):
        return values.to(parameter.device)
    device = parameter.device_mesh.device_type
    return distribute_tensor(values.to(device), parameter.device_mesh, parameter.placements, src_data_rank=None)
