"""How a model's decoder layers compute: again in the backward pass, or compiled."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lachesis.schemas.errors import ConfigError

__all__ = ["decoder_layers", "recompute_layers"]


def decoder_layers(model: Any) -> list[Any]:
    """Return the model's layers, of those that can be computed again; none for a model without."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def recompute_layers(model: Any, *, on: bool) -> None:
    """Recompute layers in the backward pass, so that only their inputs stay in memory.

    Raises `ConfigError` when the model has no layers that can. Dropout stays off: of its modules only the layers
    themselves, which have none of their own, count as training.
    """
    layers = decoder_layers(model)
    if on and not layers:
        raise ConfigError(
            f"training.learner.recompute_layers: {type(model).__name__} has no layers that can be computed again"
        )
    for layer in layers:
        layer.training = layer.gradient_checkpointing = on
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer._gradient_checkpointing_func = again  # noqa: SLF001 - what its documentation asks for
