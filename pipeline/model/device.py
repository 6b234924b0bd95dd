"""Chooses a trainer's device, and decides whether its steps can be repeated to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Literal, TypeVar

import torch

from lachesis.schemas.errors import ConfigError

__all__ = ["Determinism", "lacks_deterministic_form", "prepare_device", "take_repeatably"]

Determinism = Literal["auto", "always", "never"]
"""See `training.deterministic`."""

T = TypeVar("T")

_NO_DETERMINISTIC_FORM = " does not have a deterministic implementation"
"""What torch says of an operation in the error that it raises."""


def prepare_device(setting: str, threads: int, *, deterministic: Determinism = "auto") -> torch.device:
    """Return the device that `training.device` names, and make torch deterministic on it.

    On a CPU that takes one thread as well. On a GPU torch then raises an error for an operation that has no
    deterministic form (see `take_repeatably`), unless `deterministic` is "never". Raises `ConfigError` where there is
    no such device.
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
        # Nothing here reads memory that it has not written: writing NaN into each new tensor would be time lost.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    _make_deterministic(on=device.type == "cpu" or deterministic != "never")
    return device


def lacks_deterministic_form(error: BaseException) -> bool:
    """Return whether torch raised `error` for an operation that has no deterministic form on its device."""
    return _NO_DETERMINISTIC_FORM in str(error)


def take_repeatably(step: Callable[[], T], deterministic: Determinism, note: Callable[[str], None]) -> T:
    """Return what `step` does. An operation without a deterministic form on this device is named.

    "auto": `note` is called with the text, and the step is repeated without determinism, as are all later ones; so
    changes that `step` made before the error must not count. "always": raises `ConfigError`.
    """
    try:
        return step()
    except RuntimeError as error:
        operation, found, _ = str(error).partition(_NO_DETERMINISTIC_FORM)
        if not found:
            raise
        text = f"{operation}, an operation of this model, has no deterministic form on this device"
        if deterministic == "always":
            raise ConfigError(
                f'{text}, so steps taken again would not give the same bits: set training.deterministic = "never" to '
                "train without that"
            ) from error
    _make_deterministic(on=False)
    note(f"{text}: steps taken again will not give the same bits")
    return step()


def _make_deterministic(*, on: bool) -> None:
    # The backward pass of cuDNN's attention varies. FlashAttention's and the memory-efficient one are deterministic in
    # torch's strict mode alone: where it only warns, they take their faster form.
    torch.backends.cuda.enable_cudnn_sdp(not on)
    torch.use_deterministic_algorithms(mode=on)
