"""Puts the reference server's model where it computes, in the precision that it computes in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from lachesis.pipeline.inference.config import InferenceConfig
from lachesis.pipeline.model.policy import PolicyModel
from lachesis.pipeline.model.tensors import policy_tensors
from lachesis.schemas.errors import ConfigError

__all__ = ["find_device", "fitted", "forms_of", "narrow_names", "place"]


def find_device(setting: str, role: str) -> torch.device:
    """Return the device that `inference.ROLE.device` names. Raises `ConfigError` where there is none."""
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "auto":
        return torch.device("cuda", visible - 1) if visible else torch.device("cpu")
    device = torch.device(setting)
    if device.type == "cuda" and (device.index or 0) >= visible:
        found = f"{visible} GPUs" if visible else "no GPU"
        raise ConfigError(
            f'inference.{role}.device is "{setting}", but torch {torch.__version__} sees {found} here: install a build '
            f'of torch for this GPU and its driver, or set inference.{role}.device = "cpu"'
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def place(policy: PolicyModel, settings: InferenceConfig, role: str) -> torch.device:
    """Move the model to its device and precision, and return the device.

    On a GPU, products and attention give the same bits each time, so that the same requests together have the same
    answers at temperature 0. Buffers and tensors that a model keeps in float32 are not rounded: rotary frequencies in
    bfloat16 are wrong by whole positions.
    """
    torch.set_num_threads(settings.threads)
    device = find_device(settings.device, role)
    if settings.dtype == "bfloat16":
        wide = tuple(getattr(policy.model, "_keep_in_fp32_modules_strict", None) or ())
        with torch.no_grad():
            for name, parameter in policy.model.named_parameters():
                if parameter.dtype == torch.float32 and not any(part in name.split(".") for part in wide):
                    parameter.data = parameter.data.to(torch.bfloat16)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it where bits must not vary
        torch.backends.cuda.enable_cudnn_sdp(False)
    policy.model.to(device)
    return device


def forms_of(model: Any) -> dict[str, torch.Tensor]:
    """Return names, shapes and dtypes of a model's tensors as loaded: a policy's have the same."""
    return {name: torch.empty_like(tensor, device="meta") for name, tensor in policy_tensors(model).items()}


def narrow_names(model: Any) -> frozenset[str]:
    """Return the names of the tensors that `model` holds in bfloat16."""
    return frozenset(name for name, tensor in policy_tensors(model).items() if tensor.dtype == torch.bfloat16)


def fitted(tensors: Mapping[str, torch.Tensor], model: Any) -> Mapping[str, torch.Tensor]:
    """Return a policy's tensors rounded to the dtype that `model` computes in; the same if they have it."""
    targets = policy_tensors(model)
    if all(name not in targets or tensor.dtype == targets[name].dtype for name, tensor in tensors.items()):
        return tensors
    return {
        name: tensor.to(targets[name].dtype)
        if name in targets and tensor.dtype == torch.float32 and targets[name].dtype == torch.bfloat16
        else tensor
        for name, tensor in tensors.items()
    }
