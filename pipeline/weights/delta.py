"""Codes a tensor's bytes without loss: the difference to a base, in byte planes, compressed.

Neighbouring versions differ little: as integers their bits are close, so the differences are small. Their sign is
folded in (zigzag), so nearly all upper bytes are 0. Bytes of the same significance are stored together, and zlib
compresses them. For optimizer steps this takes fewer bytes than an exclusive or of the bits, because two neighbours
across a power of two differ in many bits, but by little. Without a base the difference is to 0.

A block has the elements that fill `BLOCK_BYTES`, as one plane for each byte of an element, lowest first. A plane is a
method (0: as it is, 1: zlib), its length as a little-endian uint32, and that many bytes. Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.model.digest import Bytes
from lachesis.schemas.errors import DataError

__all__ = ["BLOCK_BYTES", "decode_blocks", "encode_blocks"]

BLOCK_BYTES = 4 << 20
"""Bytes of a tensor that are coded together."""
_PLAIN, _ZLIB = 0, 1
_PLANE_HEAD = struct.Struct("<BI")
_LEVEL = 1
_PROBE_BYTES = 16 << 10
_WORTH_IT = 0.95
"""Share of the plain bytes below which a plane is stored compressed."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def encode_blocks(data: Bytes, base: Bytes | None, itemsize: int) -> Iterator[bytes]:
    """Yield the coded blocks of `data`, given `base`.

    Both are uint8 [bytes], of elements of `itemsize` bytes.
    """
    for start in range(0, data.size, BLOCK_BYTES):
        part = data[start : start + BLOCK_BYTES].view(_UNSIGNED[itemsize])
        before = None if base is None else base[start : start + BLOCK_BYTES].view(_UNSIGNED[itemsize])
        coded = part if before is None else _zigzag(part - before)
        yield b"".join(_encode_plane(plane) for plane in coded.view(np.uint8).reshape(-1, itemsize).T)


def decode_blocks(
    coded: memoryview, at: int, size: int, base: Bytes | None, itemsize: int
) -> Generator[Bytes, None, int]:
    """Yield the `size` bytes that are coded from `at` on, in blocks; return where they end.

    Raises `DataError` if `coded` is not the output of `encode_blocks`.
    """
    for start in range(0, size, BLOCK_BYTES):
        elements = min(BLOCK_BYTES, size - start) // itemsize
        planes = np.empty((elements, itemsize), np.uint8)
        for plane in range(itemsize):
            at, found = _decode_plane(coded, at, elements)
            planes[:, plane] = np.frombuffer(found, np.uint8)
        part = planes.reshape(-1).view(_UNSIGNED[itemsize])
        if base is not None:
            part = _unzigzag(part) + base[start : start + BLOCK_BYTES].view(_UNSIGNED[itemsize])
        yield part.view(np.uint8)
    return at


def _zigzag(difference: NDArray[Any]) -> NDArray[Any]:
    """Map 0, -1, 1, -2, ... of two's complement to 0, 1, 2, 3, ..."""
    bits = difference.dtype.type(8 * difference.itemsize - 1)
    one = difference.dtype.type(1)
    coded: NDArray[Any] = (difference << one) ^ (~(difference >> bits) + one)
    return coded


def _unzigzag(coded: NDArray[Any]) -> NDArray[Any]:
    one = coded.dtype.type(1)
    difference: NDArray[Any] = (coded >> one) ^ (~(coded & one) + one)
    return difference


def _encode_plane(plane: Bytes) -> bytes:
    plain = plane.tobytes()
    probe = plain[:_PROBE_BYTES]
    if len(zlib.compress(probe, _LEVEL)) < _WORTH_IT * len(probe):  # compressing noise would take long, in vain
        packed = zlib.compress(plain, _LEVEL)
        if len(packed) < _WORTH_IT * len(plain):
            return _PLANE_HEAD.pack(_ZLIB, len(packed)) + packed
    return _PLANE_HEAD.pack(_PLAIN, len(plain)) + plain


def _decode_plane(coded: memoryview, at: int, size: int) -> tuple[int, bytes | memoryview]:
    """Return where the next plane begins, and the `size` bytes of the one at `at`."""
    try:
        method, length = _PLANE_HEAD.unpack_from(coded, at)
    except struct.error as error:
        raise DataError("coded weights end too early") from error
    at += _PLANE_HEAD.size
    stored = coded[at : at + length]
    found: bytes | memoryview = stored
    if method == _ZLIB:
        unpacked = zlib.decompressobj()
        try:
            found = unpacked.decompress(stored, size + 1)  # one byte more at most, whatever its real size
        except zlib.error as error:
            raise DataError(f"coded weights cannot be unpacked: {error}") from error
    if method not in (_PLAIN, _ZLIB) or len(stored) != length or len(found) != size:
        raise DataError(f"coded weights hold a plane of {len(found)} bytes where {size} are needed")
    return at + length, found
