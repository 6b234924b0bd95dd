"""Encodes a version's weights as one payload: first the tensors' forms, then the coded blocks of each.

It encodes tensors (as bytes), given those of a base or none, into the bytes that travel, and decodes them. Guarantees
that decoding gives the same bytes, bit for bit, and never more than the forms at the beginning say. Pure, except for
the files it maps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from lachesis.pipeline.model.digest import Bytes, on_threads
from lachesis.pipeline.model.safetensors_files import DTYPES, TensorForm, file_order
from lachesis.pipeline.weights.delta import BLOCK_BYTES, decode_blocks, encode_blocks
from lachesis.schemas.errors import DataError

__all__ = ["RawTensors", "decode_payload", "encode_payload", "forms_of"]

_LENGTH = struct.Struct("<I")
_EMPTY: Bytes = np.empty(0, np.uint8)
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class _Form(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: list[_Size]


class RawTensors(msgspec.Struct, frozen=True):
    """Tensors as bytes (uint8 [bytes]) by name, and their forms."""

    forms: Mapping[str, TensorForm]
    data: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(form.nbytes for form in self.forms.values())


def encode_payload(tensors: RawTensors, base: RawTensors | None) -> Iterator[bytes]:
    """Yield the payload of `tensors` in pieces; `base`, if there is one, has tensors of the same forms.

    The blocks are coded on several threads.
    """
    forms = file_order(tensors.forms.values())
    manifest = msgspec.msgpack.encode([_Form(form.name, form.dtype, list(form.shape)) for form in forms])
    yield _LENGTH.pack(len(manifest)) + manifest
    blocks = [(form, at) for form in forms for at in range(0, form.nbytes, BLOCK_BYTES)]
    yield from on_threads(partial(_encode_block, tensors, base), blocks, tensors.nbytes)


def _encode_block(tensors: RawTensors, base: RawTensors | None, block: tuple[TensorForm, int]) -> bytes:
    form, at = block
    part = slice(at, at + BLOCK_BYTES)
    before = None if base is None else base.data[form.name][part]
    return b"".join(encode_blocks(tensors.data[form.name][part], before, form.itemsize))


def forms_of(payload: memoryview) -> tuple[list[TensorForm], int]:
    """Return the tensors' forms, in the payload's order, and where the blocks begin.

    Raises `DataError`.
    """
    try:
        (length,) = _LENGTH.unpack_from(payload)
        found = msgspec.msgpack.decode(payload[_LENGTH.size : _LENGTH.size + length], type=list[_Form])
    except (struct.error, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"coded weights do not begin with the list of their tensors: {error}") from error
    unknown = [form.dtype for form in found if form.dtype not in DTYPES]
    if unknown:
        raise DataError(f"coded weights have dtype {unknown[0][:20]!r}, which is none")
    return [TensorForm(form.name, form.dtype, tuple(form.shape)) for form in found], _LENGTH.size + length


def decode_payload(payload: memoryview, base: RawTensors | None) -> Iterator[Bytes]:
    """Yield the bytes of the payload's tensors in its order, block by block.

    Raises `DataError` if it is no payload.
    """
    forms, at = forms_of(payload)
    if base is not None and {form.name: form for form in forms} != dict(base.forms):
        raise DataError("coded weights differ from their base in names, shapes or dtypes")
    for form in forms:
        before = None if base is None else base.data[form.name]
        at = yield from decode_blocks(payload, at, form.nbytes, before, form.itemsize)
    if at != len(payload):
        raise DataError(f"coded weights have {len(payload) - at} bytes more than their tensors")
