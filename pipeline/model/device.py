"""The device that a trainer computes on."""

from __future__ import annotations

import os

import torch

from lachesis.schemas.errors import ConfigError

__all__ = ["prepare_device"]


def prepare_device(setting: str, threads: int) -> torch.device:
    """Return the device that `training.device` names, and make torch deterministic on it.

    That is so on a CPU with one thread. On a GPU some kernels have no such form: torch warns of them. Raises
    `ConfigError` where there is no such device.
    """
    torch.set_num_threads(threads)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(("cuda" if visible else "cpu") if setting == "auto" else setting)
    if device.type == "cuda" and (device.index or 0) >= visible:
        found = f"{visible} GPUs" if visible else "no GPU"
        raise ConfigError(
            f'training.device is "{setting}", but torch {torch.__version__} sees {found} here: install a build of '
            'torch for this GPU and its driver, or set training.device = "cpu"'
        )
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it where bits must not vary
    torch.use_deterministic_algorithms(mode=True, warn_only=device.type == "cuda")
    return device
