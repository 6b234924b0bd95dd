"""Checks that the stream WEIGHTS can hold the weights, if they travel through the run's server."""

from __future__ import annotations

from pathlib import Path

from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.model.safetensors_files import read_raw
from lachesis.pipeline.model.shards import weight_file_names
from lachesis.pipeline.weights.config import WeightsConfig
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["ample_bytes", "check_weights_room", "published_bytes"]

_MIN_VERSIONS = 1.05
"""Whole versions that WEIGHTS must hold: one, and the stream's bookkeeping."""
_AMPLE_VERSIONS = 3
_FIXED_BYTES = 4 << 20
_BYTES = {"float32": 4, "bfloat16": 2}


def published_bytes(model: str | None, config: WeightsConfig) -> int | None:
    """Return the bytes that a whole version of a model's weights takes, None if it is no folder here."""
    folder = Path(model or "")
    if model is None or not folder.is_dir():
        return None
    try:
        files = [read_raw(folder / name) for name in weight_file_names(folder)]
    except (ConfigError, DataError, NotFoundError):
        return None  # loading the model reports what is wrong with it
    elements = sum(form.nbytes // form.itemsize for file in files for form in file.forms.values())
    return elements * _BYTES[config.dtype]


def ample_bytes(size: int) -> int:
    """Return the budget with which a version of `size` bytes is deleted only after a newer one is stored."""
    return _AMPLE_VERSIONS * size + _FIXED_BYTES


def check_weights_room(model: str | None, config: WeightsConfig, budget: int) -> None:
    """Raise `ConfigError` if weights travel through the run's server and one version does not fit.

    `budget`: the bytes that the stream WEIGHTS holds.
    """
    if config.transport != "nats":
        return
    size = published_bytes(model, config)
    least = 2 * _FIXED_BYTES if size is None else int(_MIN_VERSIONS * size) + _FIXED_BYTES
    if budget < least:
        ample = "three times what the weights take" if size is None else ample_bytes(size)
        raise ConfigError(
            f'weights.transport is "nats", but streams.weights_bytes is {budget}: set it to '
            f"{ample}, and to {least} at least"
        )
