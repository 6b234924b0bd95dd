"""Whether the stream of weights holds the model's, where they travel through the run's server. No torch."""

from __future__ import annotations

from pathlib import Path

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.model.raw_weights import read_raw
from lachesis.pipeline.model.shards import weight_file_names
from lachesis.schemas.errors import ConfigError, DataError, NotFoundError

__all__ = ["AMPLE_VERSIONS", "LEAST_VERSIONS", "check_weights_room", "published_bytes"]

LEAST_VERSIONS = 1.05
"""Whole versions that WEIGHTS must hold: one, and the stream's bookkeeping."""
AMPLE_VERSIONS = 3.0
"""Whole versions from which on a version expires only after newer ones that build on nothing else are there."""
_FIXED_BYTES = 4 << 20
_BYTES = {"float32": 4, "bfloat16": 2}


def published_bytes(config: RunConfig) -> int | None:
    """Return what a version of the run's weights takes whole, bytes; None where the model is not in a folder here."""
    folder = Path(config.model or "")
    if config.model is None or not folder.is_dir():
        return None
    try:
        files = [read_raw(folder / name) for name in weight_file_names(folder)]
    except (ConfigError, DataError, NotFoundError):
        return None  # loading the model says what is wrong with it
    elements = sum(form.nbytes // form.itemsize for file in files for form in file.forms.values())
    return elements * _BYTES[config.weights.dtype]


def check_weights_room(config: RunConfig) -> None:
    """Raise `ConfigError` if weights travel through the run's server and not even one version fits its stream."""
    if config.weights.transport != "nats":
        return
    size = published_bytes(config)
    least = 2 * _FIXED_BYTES if size is None else int(LEAST_VERSIONS * size) + _FIXED_BYTES
    if config.streams.weights_bytes < least:
        wanted = "three times what the weights take" if size is None else f"{int(AMPLE_VERSIONS * size) + _FIXED_BYTES}"
        raise ConfigError(
            f'weights.transport is "nats", but streams.weights_bytes is {config.streams.weights_bytes}: set it to '
            f"{wanted}, and to {least} at least"
        )
