"""The device that a trainer computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lachesis.schemas.errors import ConfigError

__all__ = ["naming_nondeterminism", "prepare_device"]

_NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"
"""What torch says of an operation in the error that it raises."""


def prepare_device(setting: str, threads: int, *, deterministic: bool = True) -> torch.device:
    """Return the device that `training.device` names, and make torch deterministic on it.

    On a CPU that takes one thread as well. On a GPU torch then raises an error for an operation that has no
    deterministic form (see `naming_nondeterminism`), unless `deterministic` is False. Raises `ConfigError` where there
    is no such device.
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
        # The backward pass of cuDNN's attention varies. FlashAttention's and the memory-efficient one are deterministic
        # in torch's strict mode alone: where it only warns, they take their faster form.
        torch.backends.cuda.enable_cudnn_sdp(not deterministic)
        # Nothing here reads memory that it has not written: writing NaN into each new tensor would be time lost.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(mode=deterministic or device.type == "cpu")
    return device


@contextmanager
def naming_nondeterminism() -> Iterator[None]:
    """Raise `ConfigError`, naming operation and setting, where one has no deterministic form here."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(_NO_DETERMINISTIC_FORM)
        if not found:
            raise
        raise ConfigError(
            f"{operation.strip()}, an operation of this model, has no deterministic form on this device, so steps "
            "taken again would not give the same weights: set training.deterministic = false to train without that"
        ) from error
