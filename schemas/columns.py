"""Columns: arrays as little-endian bytes inside an event, read back as numpy views without a copy."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import SchemaError

__all__ = ["Column", "DType", "as_bytes", "row_bytes", "view"]

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


def row_bytes(column: Column) -> int:
    """Return how many bytes a row of a column has."""
    return int(_DTYPES[column.dtype].itemsize) * column.width


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
