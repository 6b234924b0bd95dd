"""Says how the trainer of a run sets up its model."""

import torch

from lachesis.pipeline.model.policy import ModelSetup
from lachesis.pipeline.trainer.settings import TrainerSettings

__all__ = ["model_setup"]


def model_setup(settings: TrainerSettings, device: torch.device) -> ModelSetup:
    """Return how the trainer of a run sets up its model on `device`."""
    training = settings.training
    images = any(one.input == "images" for one in training.inputs)
    return ModelSetup(
        device,
        training.attention,
        training.lora,
        settings.model,
        settings.seed,
        settings.tokenizer,
        settings.chat_template,
        images,
        tuple(settings.model_exceptions),
    )
