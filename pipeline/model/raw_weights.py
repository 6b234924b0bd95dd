"""Weights as plain bytes: safetensors files read and written without torch.

Services that carry weights, but compute nothing with them, need no torch for it. Guarantees: `raw_digest` is what
`tensors.weights_digest` gives for the same tensors, and a file that `write_raw` has written is one that `safetensors`
reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import DataError, NotFoundError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "DTYPES",
    "UNFIT",
    "RawFile",
    "TensorForm",
    "file_order",
    "raw_digest",
    "read_raw",
    "weights_path",
    "write_raw",
]

DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""By safetensors' code: torch's name of the dtype, and bytes of an element."""
UNFIT = "does not fit the model"
"""What is said of weights whose tensors are not those of a server's model: no later version of them will fit."""
_MAX_HEADER_BYTES = 64 << 20
_HASHED_BYTES = 1 << 20


class TensorForm(NamedTuple):
    """A tensor's name, safetensors' code of its dtype, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.itemsize


class RawFile(NamedTuple):
    """A file's metadata, its tensors' forms by name, and their bytes (uint8 [bytes], mapped from the file)."""

    metadata: Mapping[str, str]
    forms: Mapping[str, TensorForm]
    data: Mapping[str, NDArray[np.uint8]]


def weights_path(folder: str | Path, version: PolicyVersion) -> Path:
    """Return where the weights of `version` lie."""
    return Path(folder) / f"{version}.safetensors"


def file_order(forms: Iterable[TensorForm]) -> list[TensorForm]:
    """Return the order of tensors in a file: wider elements first, so that all are aligned."""
    return sorted(forms, key=lambda form: (-form.itemsize, form.name))


def read_raw(path: Path) -> RawFile:
    """Map a file into memory.

    Raises `NotFoundError` where there is none, `DataError` where it is no whole one.
    """
    try:
        content = np.memmap(path, np.uint8, "r")
    except FileNotFoundError as error:
        raise NotFoundError(f"weights file {path} does not exist; it may have been pruned.") from error
    except (OSError, ValueError) as error:
        raise DataError(f"weights file {path} cannot be read: {error}.") from error
    try:
        (length,) = struct.unpack("<Q", content[:8].tobytes())
        header: dict[str, Any] = json.loads(content[8 : 8 + min(length, _MAX_HEADER_BYTES)].tobytes())
        metadata: dict[str, str] = header.pop("__metadata__", {})
        forms = {name: TensorForm(name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
        data = {name: content[8 + length + start : 8 + length + end] for name, (start, end) in spans.items()}
        whole = all(data[name].size == form.nbytes for name, form in forms.items())
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"weights file {path} cannot be read: {error!r}.") from error
    if not whole:
        raise DataError(f"weights file {path} is cut off.")
    return RawFile(metadata, forms, data)


def write_raw(
    path: Path, forms: Sequence[TensorForm], blocks: Iterator[NDArray[np.uint8]], metadata: Mapping[str, str]
) -> None:
    """Write a file of tensors in `file_order` from the blocks of their bytes, one tensor after the other."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for form in forms:
        header[form.name] = {
            "dtype": form.dtype,
            "shape": list(form.shape),
            "data_offsets": [offset, offset + form.nbytes],
        }
        offset += form.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for block in blocks:
            file.write(block.data)


def raw_digest(file: RawFile) -> str:
    """Return the SHA-256 (64 hex digits) of a file's tensors; see `tensors.weights_digest`."""
    digest = hashlib.sha256()
    for name, form in sorted(file.forms.items()):
        digest.update(f"{name}\0torch.{DTYPES[form.dtype][0]}\0{form.shape}\0".encode())
        data = file.data[name]
        for start in range(0, data.size, _HASHED_BYTES):
            digest.update(data[start : start + _HASHED_BYTES].tobytes())
    return digest.hexdigest()
