"""Columns: arrays as little-endian bytes inside an event, read back as numpy views without a copy."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import SchemaError

__all__ = ["Column", "DType", "as_bytes", "pack_mask", "unpack_mask", "view"]

DType = Literal["uint8", "int16", "int32", "int64", "float16", "float32", "float64"]

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in DType.__args__}  # type: ignore[attr-defined]


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """A named, typed column with one row per token: `data` holds rows x width values of `dtype`."""

    dtype: DType
    data: bytes
    width: int = 1


def as_bytes(values: Sequence[Any] | NDArray[Any], dtype: DType) -> bytes:
    """Return `values` as little-endian bytes of `dtype`."""
    return np.ascontiguousarray(values, dtype=_DTYPES[dtype]).tobytes()


def view(data: bytes, dtype: DType, rows: int, what: str, width: int = 1) -> NDArray[Any]:
    """Return a read-only view, [rows] or [rows, width], over `data`.

    Raises `SchemaError` naming `what` when the byte length is not rows x width values of `dtype`.
    """
    kind = _DTYPES[dtype]
    if width < 1 or len(data) != rows * width * kind.itemsize:
        raise SchemaError(
            f"{what}: {len(data)} bytes where {rows} x {width} {dtype} need {rows * width * kind.itemsize}"
        )
    array = np.frombuffer(data, dtype=kind)
    return array if width == 1 else array.reshape(rows, width)


def pack_mask(mask: Sequence[bool] | NDArray[np.bool_]) -> bytes:
    """Return a boolean mask [T] as ceil(T / 8) bytes, first token in the lowest bit."""
    return np.packbits(np.asarray(mask, dtype=np.bool_), bitorder="little").tobytes()


def unpack_mask(data: bytes, rows: int, what: str) -> NDArray[np.bool_]:
    """Return the mask [rows] that `pack_mask` packed. Raises `SchemaError` on a wrong length."""
    if len(data) != (rows + 7) // 8:
        raise SchemaError(f"{what}: {len(data)} bytes where a mask of {rows} tokens needs {(rows + 7) // 8}")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=rows, bitorder="little").view(np.bool_)
