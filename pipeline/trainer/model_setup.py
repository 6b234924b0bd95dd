"""Says how the trainer of a run sets up its model."""

import torch

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.model.policy import ModelSetup

__all__ = ["model_setup"]


def model_setup(config: RunConfig, device: torch.device) -> ModelSetup:
    """Return how the trainer of a run sets up its model on `device`."""
    training = config.training
    images = any(one.input == "images" for one in training.inputs)
    return ModelSetup(
        device,
        training.attention,
        training.lora,
        config.model,
        config.seed,
        config.tokenizer,
        config.chat_template,
        images,
        tuple(config.model_exceptions),
    )
