"""Names the safetensors files that hold a model's weights, by the index in the model's folder.

Guarantees that each is a file directly in that folder: an index comes with a model from elsewhere, and its names are
joined to paths. Imports neither torch nor transformers.
"""

import json
from pathlib import Path
from typing import Any

from lachesis.pipeline.common.small_files import read_small_file
from lachesis.schemas.errors import ConfigError

__all__ = ["INDEX_FILE", "SINGLE_FILE", "indexed_tensors", "weight_file_names"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SUFFIX = ".safetensors"


def weight_file_names(folder: Path) -> list[str]:
    """Return the names of the weights files in `folder`, in order; without an index there is one.

    Raises `ConfigError` when the index cannot be read, or names anything but safetensors files of the folder.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    try:
        names = set(_weight_map(index).values())
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{str(index)!r} cannot be read as an index of weights: {type(error).__name__}: {error}"
        ) from error
    foreign = sorted(repr(name) for name in names if not _is_own(name))
    if foreign or not names:
        found = ", ".join(foreign)[:200] or "no file"
        raise ConfigError(
            f"{str(index)!r} names {found}; weights are read from *{_SUFFIX} files of its own folder alone. "
            "Save the model again with save_pretrained, or take it from a source that you trust"
        )
    return sorted(names)


def indexed_tensors(folder: Path) -> set[str]:
    """Return the names of the tensors that the index in `folder` promises; without an index none.

    Raises `ConfigError` when it cannot be read.
    """
    index = folder / INDEX_FILE
    return set(_weight_map(index)) if index.exists() else set()


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(read_small_file(index))["weight_map"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{str(index)!r} cannot be read as an index of weights: {type(error).__name__}: {error}"
        ) from error
    return found


def _is_own(name: object) -> bool:
    """Return whether a name is that of a file in the index's own folder: no path, no parent, no link out by dots."""
    return isinstance(name, str) and name.endswith(_SUFFIX) and not set("/\\\0") & set(name)
