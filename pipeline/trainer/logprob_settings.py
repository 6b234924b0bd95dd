"""Derives from a learner's configuration how logprobs are computed. Pure."""

import torch

from lachesis.pipeline.model.logprobs import LogprobSettings
from lachesis.pipeline.trainer.config import LearnerConfig

__all__ = ["logprob_settings"]


def logprob_settings(config: LearnerConfig, device: str) -> LogprobSettings:
    """Return how logprobs are computed on a kind of device, such as cuda."""
    return LogprobSettings(
        precision=torch.bfloat16 if config.uses_bfloat16(device) else torch.float32,
        float32_head=config.float32_head,
        entropy_gradient=config.loss.entropy_coef > 0,
        by_device=config.device_kernels,
    )
