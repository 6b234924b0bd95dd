"""Checks a model's weights files without loading them, by their headers and their index.

Guarantees that a truncated file, a missing shard, a tensor in no shard, and quantized weights are named before anything
is loaded. Reads a few kilobytes of each file. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lachesis.pipeline.model.faults import QUANTIZATION, ModelFaults, some
from lachesis.pipeline.model.shards import INDEX_FILE, SINGLE_FILE, indexed_tensors, weight_file_names
from lachesis.schemas.errors import ConfigError

__all__ = ["StoredTensor", "add_stored_faults", "check_weight_files", "read_header"]

_MAX_HEADER_BYTES = 100 << 20
"""As safetensors has it."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PACKED = re.compile(r"^(I8|U8|F8_.*|F4.*|F6_.*|I4|U4)$")
"""safetensors' codes of dtypes in which quantized weights are stored."""
_QUANTIZED_NAME = re.compile(r"(weight|qweight|qzeros|weight_packed|_proj|_blocks|_scales)$")
_NO_WEIGHT = re.compile(r"(attn|attention|crossattention)\.(masked_)?bias$|position_ids$|causal_mask$")
_LFS_POINTER = b"version https://git-lfs"
_AGAIN = "download it again"


class StoredTensor(NamedTuple):
    """A tensor of a file: safetensors' code of its dtype, and its shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file by name.

    Raises `ConfigError` unless all their bytes are there.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            length = int.from_bytes(start[:8], "little")
            if start == _LFS_POINTER:
                raise ConfigError(
                    f"{str(path)!r} is a pointer of Git LFS, not the weights: `git lfs pull` fetches them"
                )
            if size < 8 or length > min(_MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{str(path)!r} ({size} bytes) is cut off, or no safetensors file: {_AGAIN}")
            file.seek(8)
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        found = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is no safetensors file: {type(error).__name__}: {error}; {_AGAIN}") from error
    if size != end:
        text = "is cut off" if size < end else "has more than its tensors"
        raise ConfigError(f"{str(path)!r} {text}: {size} bytes, where its header says {end}; {_AGAIN}")
    return found


def check_weight_files(folder: Path, config: dict[str, Any], exceptions: Sequence[str] = ()) -> None:
    """Raise `ConfigError` that says what is wrong with the weights in `folder`, by their headers.

    `config`: what its config.json says. `exceptions`: see `ModelFaults`.
    """
    names = weight_file_names(folder)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        by = f"{len(absent)} of the {len(names)} files that its {INDEX_FILE} names: {some(absent)}"
        lacking = by if (folder / INDEX_FILE).exists() else f"{absent[0]}, nor an index of several files, {INDEX_FILE}"
        raise ConfigError(f"the folder {str(folder)!r} holds no whole model: it lacks {lacking}; {_AGAIN}")
    if SINGLE_FILE not in names and (folder / SINGLE_FILE).is_file():
        raise ConfigError(
            f"the folder {str(folder)!r} holds two models: {SINGLE_FILE}, and the files that {INDEX_FILE} names; "
            "servers and trainers would take different ones, so delete one of them"
        )
    stored: dict[str, StoredTensor] = {}
    for name in names:
        stored |= read_header(folder / name)
    faults = ModelFaults(exceptions)
    faults.add_names(f"tensors that {INDEX_FILE} names and no file has", indexed_tensors(folder) - stored.keys())
    add_stored_faults(faults, stored, config)
    problem = faults.text(str(folder))
    if problem is not None:
        raise ConfigError(f"the folder {str(folder)!r} holds no whole model: {problem}")


def add_stored_faults(faults: ModelFaults, stored: dict[str, StoredTensor], config: dict[str, Any]) -> None:
    """Add the weights that are quantized."""
    settings = config.get(QUANTIZATION)
    if settings:
        method = settings.get("quant_method", "unknown") if isinstance(settings, dict) else "unknown"
        faults.add("quantized weights", QUANTIZATION, f" ({method}); train the model that it was made of")
    for name, tensor in sorted(stored.items()):
        if tensor.dtype in _FLOATS or not math.prod(tensor.shape) or _NO_WEIGHT.search(name):
            continue
        packed = _PACKED.match(tensor.dtype) is not None and len(tensor.shape) > 1
        if packed or (tensor.dtype != "BOOL" and _QUANTIZED_NAME.search(name)):
            faults.add("quantized weights", name, f" is {tensor.dtype}")
