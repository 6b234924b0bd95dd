"""Sets how a model's decoder layers compute: again in the backward pass, or compiled."""

from __future__ import annotations

import os
import shutil
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lachesis.schemas.errors import ConfigError

__all__ = ["compile_layers", "decoder_layers", "recompute_layers"]


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


def compile_layers(model: Any, *, on: bool, device: str) -> None:
    """Compile the model's layers, each by itself, for passes of any size; or compute them as they are.

    Layers of one kind share what is compiled, and what is compiled is a layer's pass without its recomputation. Raises
    `ConfigError` when there is no layer or no compiler.
    """
    layers = decoder_layers(model)
    if on and not layers:
        raise ConfigError(f"training.learner.compile: {type(model).__name__} has no layers that can be compiled")
    if on and device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise ConfigError("training.learner.compile: a C++ compiler (g++ or clang++) is needed on a CPU; install one")
    for layer in layers:
        if not on:
            layer._compiled_call_impl = None  # noqa: SLF001 - there is no public way back from `Module.compile`
        elif layer._compiled_call_impl is None:  # noqa: SLF001
            layer.compile(dynamic=True)
