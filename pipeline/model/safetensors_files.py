"""Weights as plain bytes: safetensors files read, checked and written without torch.

So services that carry weights but do not compute with them need no torch. Guarantees: digests here are those that
`tensors.weights_digest` gives for the same tensors; `safetensors` can read a file that is written here; and bytes are
digested in the pass that writes or copies them, on several threads.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lachesis.pipeline.common.outages import EXHAUSTED
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.model.digest import (
    PIECE_BYTES,
    Bytes,
    Piece,
    RunningDigest,
    WeightsDigest,
    digest_in_order,
    digest_of_pieces,
    hash_bytes,
    label,
    on_threads,
    pieces_of,
)
from lachesis.pipeline.model.faults import some
from lachesis.schemas.errors import DataError
from lachesis.schemas.ids import PolicyVersion

__all__ = [
    "DTYPES",
    "UNFIT",
    "RawFile",
    "TensorForm",
    "copy_checked",
    "file_order",
    "is_finite",
    "raw_digest",
    "read_raw",
    "weights_path",
    "write_blocks",
    "write_digested",
]

DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "I64": ("int64", 8),
    "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""By safetensors' code: torch's name of the dtype, and bytes of an element."""
UNFIT = "does not fit the model"
"""What is said of weights whose tensors are not those of a server's model: no later version of them will fit."""
_MAX_HEADER_BYTES = 64 << 20
_EXPONENTS = {"F64": 0x7FF0 << 48, "F32": 0x7F80 << 16, "F16": 0x7C00, "BF16": 0x7F80}
"""Bits of the exponent by dtype: all of them are set in values that are not finite, and in no others."""
_UNSIGNED: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


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

    @property
    def label(self) -> bytes:
        """Name, dtype and shape, as a digest takes them."""
        return label(self.name, f"torch.{DTYPES[self.dtype][0]}", self.shape)


class RawFile(NamedTuple):
    """A file's metadata, its tensors' forms by name, and their bytes (uint8 [bytes], mapped from the file).

    `is_canonical`: whether the file is, but for the tensors' bytes, what is written here for these forms and metadata.
    """

    metadata: Mapping[str, str]
    forms: Mapping[str, TensorForm]
    data: Mapping[str, Bytes]
    is_canonical: bool


def weights_path(folder: str | Path, version: PolicyVersion) -> Path:
    """Return where the weights of `version` lie."""
    return Path(folder) / f"{version}.safetensors"


def file_order(forms: Iterable[TensorForm]) -> list[TensorForm]:
    """Return the order of tensors in a file: wider elements first, so that all are aligned."""
    return sorted(forms, key=lambda form: (-form.itemsize, form.name))


def read_raw(path: Path) -> RawFile:
    """Map a file into memory.

    Raises `NotFoundError` where there is none, `DataError` where it is no whole one, `InfrastructureError` where this
    process lacks the memory or the file descriptors for it.
    """
    try:
        content = np.memmap(path, np.uint8, "r")
    except FileNotFoundError as error:
        raise NotFoundError(f"weights file {path} does not exist; it may have been pruned.") from error
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            raise InfrastructureError(f"weights file {path} cannot be read: {error}.") from error
        raise DataError(f"weights file {path} cannot be read: {error}.") from error
    length = int.from_bytes(content[:8].tobytes(), "little")
    if content.size - 8 < length <= _MAX_HEADER_BYTES:
        raise DataError(f"weights file {path} cannot be read: it is cut off within its header.")
    try:
        header: dict[str, Any] = json.loads(content[8 : 8 + min(length, _MAX_HEADER_BYTES)].tobytes())
        metadata = dict[str, str](header.pop("__metadata__", {}).items())
        _check_text([*metadata.values(), *header])
        forms = {name: TensorForm(name, entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        spans = {name: entry["data_offsets"] for name, entry in header.items()}
        data = {name: content[8 + length + start : 8 + length + end] for name, (start, end) in spans.items()}
        torn = [name for name, form in forms.items() if data[name].size != form.nbytes]
        canonical = _header(list(forms.values()), metadata)
        end = len(canonical) + sum(form.nbytes for form in forms.values())
        is_canonical = content.size == end and content[: len(canonical)].tobytes() == canonical
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"weights file {path} cannot be read: {type(error).__name__}: {error}.") from error
    if torn:
        raise DataError(f"weights file {path} cannot be read: it is cut off and lacks bytes of {some(torn)}.")
    return RawFile(metadata, forms, data, is_canonical)


def write_blocks(
    path: Path,
    forms: Sequence[TensorForm],
    blocks: Iterable[Bytes],
    metadata: Callable[[WeightsDigest], Mapping[str, str]],
) -> WeightsDigest:
    """Write a file of tensors from blocks of bytes, one tensor after the other; return the digest.

    Blocks and `metadata` are as for `RunningDigest` and `write_digested`.
    """
    labels = {one.name: one.label for one in forms}
    with path.open("wb") as file, RunningDigest({one.name: one.nbytes for one in forms}, labels) as running:
        file.write(_header(forms, metadata(digest_of_pieces(labels, {}))))
        for block in blocks:
            running.update(block)
            file.write(block.data)
        found = running.digest()
        file.seek(0)
        file.write(_header(forms, metadata(found)))
    return found


def write_digested(
    path: Path,
    forms: Iterable[TensorForm],
    data: Mapping[str, Bytes],
    metadata: Callable[[WeightsDigest], Mapping[str, str]],
) -> WeightsDigest:
    """Write a file of tensors, digested piece by piece as it is written; return the digest.

    `metadata` is that of the file, given the digest. It takes as many bytes for one digest as for any other.
    """
    ordered = file_order(forms)
    labels = {one.name: one.label for one in ordered}
    at = len(_header(ordered, metadata(digest_of_pieces(labels, {}))))
    offsets = {}
    for one in ordered:
        offsets[one.name] = at
        at += one.nbytes
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:

        def write(piece: Piece) -> bytes:
            part = data[piece.name][piece.start : piece.end].data
            _write_at(descriptor, part, offsets[piece.name] + piece.start)
            return hash_bytes(part)

        pieces = [piece for one in ordered for piece in pieces_of(one.name, one.nbytes)]
        found = digest_of_pieces(labels, dict(zip(pieces, on_threads(write, pieces, at), strict=True)))
        _write_at(descriptor, memoryview(_header(ordered, metadata(found))), 0)
    finally:
        os.close(descriptor)
    return found


def copy_checked(
    file: RawFile, targets: Mapping[str, Bytes], *, widen: Collection[str] = ()
) -> tuple[WeightsDigest, list[str]]:
    """Copy a file's tensors, each piece digested and looked at as it is copied, on several threads.

    `targets`: memory of the tensors' sizes, by name; twice as large for those in `widen`, which are bfloat16 and become
    float32 there. Return the digest, and the names of the tensors with values that are not finite. What is digested are
    the bytes that were copied: the file may be changed meanwhile.
    """

    scratch = threading.local()

    def copy(piece: Piece) -> tuple[bytes, bool]:
        source = file.data[piece.name][piece.start : piece.end]
        if piece.name not in widen:
            part = targets[piece.name][piece.start : piece.end]
            np.copyto(part, source)
        else:
            if not hasattr(scratch, "memory"):  # one for each thread: new memory costs more than a copy into it
                scratch.memory = np.empty(PIECE_BYTES, np.uint8)
            part = scratch.memory[: source.size]
            np.copyto(part, source)
            wide = targets[piece.name][2 * piece.start : 2 * piece.end].view(np.uint32)
            np.copyto(wide, part.view(np.uint16))
            np.left_shift(wide, np.uint32(16), out=wide)
        return hash_bytes(part.data), is_finite(part, file.forms[piece.name].dtype)

    pieces = [piece for one in file.forms.values() for piece in pieces_of(one.name, one.nbytes)]
    found = on_threads(copy, pieces, sum(one.nbytes for one in file.forms.values()))
    digests = {piece: digest for piece, (digest, _) in zip(pieces, found, strict=True)}
    infinite = {piece.name for piece, (_, finite) in zip(pieces, found, strict=True) if not finite}
    labels = {name: one.label for name, one in file.forms.items()}
    return digest_of_pieces(labels, digests), sorted(infinite)


def is_finite(part: Bytes, dtype: str) -> bool:
    """Return whether all values in bytes of `dtype`, a code of `DTYPES`, are finite."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None or not part.size:
        return True
    unsigned = part.view(_UNSIGNED[DTYPES[dtype][1]])
    signed = unsigned.view(f"i{unsigned.itemsize}")
    sign = 1 << 8 * unsigned.itemsize - 1
    return int(signed.max()) < exponent and int(unsigned.max()) < sign | exponent  # of values above 0, and below


def raw_digest(file: RawFile) -> WeightsDigest:
    """Return the digest of a file's tensors; see `tensors.weights_digest`."""
    return digest_in_order(((name, one.label, file.data[name]) for name, one in sorted(file.forms.items())))


def _check_text(found: Iterable[Any]) -> None:
    """Raise `ValueError` or `TypeError` where something is no text that has bytes."""
    for one in found:
        if not isinstance(one, str):
            raise TypeError(f"{one!r} is no text")
        one.encode()


def _header(forms: Sequence[TensorForm], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for form in forms:
        entries[form.name] = {
            "dtype": form.dtype,
            "shape": list(form.shape),
            "data_offsets": [offset, offset + form.nbytes],
        }
        offset += form.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: the system may take less at a time."""
    while data.nbytes:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
