"""Packs masks into bits and token ids into as many bits as the largest needs, and compresses texts.

Works on bytes. Guarantees that what is unpacked is bounded before it is allocated, whatever the sender claims, and that
nothing but `SchemaError` is raised.

Token ids are split: the low 16 bits as uint16 [T], and each higher bit that any of them has as a packed mask [T], the
lowest first. A vocabulary below 65,536 needs no such mask, one of 150,000 needs two: 18 bits a token instead of 32.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import SchemaError

__all__ = ["deflate", "inflate", "join_tokens", "pack_mask", "split_tokens", "unpack_mask"]

_LOW_BITS = 16
_HIGH_BITS = 15
"""Bits of a token id above the low ones; a sign is not among them."""
_LEVEL = 1
"""Of zlib. On English text the default level, 6, saves a tenth of the bytes more and takes five times as long."""


def pack_mask(mask: Sequence[bool] | NDArray[np.bool_]) -> bytes:
    """Return a boolean mask [T] as ceil(T / 8) bytes, first token in the lowest bit."""
    return np.packbits(np.asarray(mask, dtype=np.bool_), bitorder="little").tobytes()


def unpack_mask(data: bytes, rows: int, what: str) -> NDArray[np.bool_]:
    """Return the mask [rows] that `pack_mask` packed. Raises `SchemaError` on a wrong length."""
    if len(data) != (rows + 7) // 8:
        raise SchemaError(f"{what}: {len(data)} bytes where a mask of {rows} tokens needs {(rows + 7) // 8}")
    return np.unpackbits(np.frombuffer(data, np.uint8), count=rows, bitorder="little").view(np.bool_)


def split_tokens(tokens: bytes) -> tuple[bytes, bytes] | None:
    """Return the low halves and the higher bits of int32 token ids [T]; None of what are no token ids."""
    if not tokens or len(tokens) % 4:
        return None
    ids = np.frombuffer(tokens, "<i4")
    if ids.min() < 0:
        return None
    high = ids >> _LOW_BITS
    planes = [pack_mask((high >> i & 1).astype(np.bool_)) for i in range(int(high.max()).bit_length())]
    return ids.astype("<u2").tobytes(), b"".join(planes)


def join_tokens(low: bytes, high: bytes) -> bytes:
    """Return the int32 token ids [T] that `split_tokens` split. Raises `SchemaError` on wrong lengths."""
    rows, odd = divmod(len(low), 2)
    size = (rows + 7) // 8
    planes = len(high) // size if size else 0
    if odd or len(high) != planes * size or planes > _HIGH_BITS:
        raise SchemaError(
            f"token_bits: {len(low)} bytes of tokens and {len(high)} of bits; a token has 2 bytes, and at most "
            f"{_HIGH_BITS} bits more, each in a mask of {size} bytes"
        )
    ids = np.frombuffer(low, "<u2").astype("<i4")
    for i in range(planes):
        plane = unpack_mask(high[i * size : (i + 1) * size], rows, "token_bits")
        ids |= plane.astype("<i4") << (_LOW_BITS + i)
    return ids.tobytes()


def deflate(data: bytes) -> bytes:
    """Return `data` compressed (zlib)."""
    return zlib.compress(data, _LEVEL)


def inflate(data: bytes, most: int, what: str) -> bytes:
    """Return what `deflate` compressed, at most `most` bytes.

    Raises `SchemaError` naming `what` when it is more (no more than `most` are ever unpacked), cut short or damaged.
    """
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise SchemaError(f"{what}: {error}") from error
    if len(found) > most:
        raise SchemaError(f"{what}: {len(data)} bytes that unpack to more than the {most} allowed here")
    if not stream.eof or stream.unused_data:
        raise SchemaError(f"{what}: {len(data)} bytes are not one whole zlib stream")
    return found
