"""A policy's weights in the run's stream WEIGHTS: chunks, and a head that lists them.

A version is either whole, or what changed since the version before it (`base`). The head is written last, so a trainer
that dies in the middle leaves chunks that nothing refers to.
"""

import itertools
from typing import Annotated, Final, Literal

from msgspec import Meta

from lachesis.schemas.codec import Event
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ids import PolicyVersion
from lachesis.schemas.values import Count, Seq

__all__ = ["WEIGHTS_CHUNK_BYTES", "WEIGHTS_LOCATION", "WeightsDtype", "WeightsHead", "head_seq", "weights_location"]

WEIGHTS_CHUNK_BYTES: Final = 1 << 20
"""Bytes of each chunk but the last."""
WEIGHTS_LOCATION: Final = "nats:"
"""How `PolicyRecord.weights` begins where the weights are in the run's stream; the sequence of the head follows."""

WeightsDtype = Literal["float32", "bfloat16"]


class WeightsHead(Event, frozen=True, kw_only=True):
    """Where a version's weights are, and how to know them.

    `chunks` are the sequences of its parts in order; together they have `size` bytes and this SHA-256. Decoded they
    are `plain_size` bytes of tensors, `dtype` is what floating-point ones were rounded to (float32: not at all), and
    `version` ends with the digest that they must have. `base` is the version that the decoder starts from, None where
    it starts from nothing. `previous` is the sequence of the head before this one, `chain` that of the first chunk of
    the newest version without a base: what lies below it is not needed to decode this one.
    """

    run: str
    version: str
    base: str | None
    dtype: WeightsDtype
    chunks: Annotated[list[Seq], Meta(min_length=1)]
    size: Count
    plain_size: Count
    sha256: bytes
    previous: Seq | None
    chain: Seq

    def check(self) -> None:
        PolicyVersion.parse(self.version)
        if self.base is not None:
            PolicyVersion.parse(self.base)
            if self.previous is None:
                raise SchemaError("previous: a version with a base has a head before its own")
        if len(self.chunks) != max(1, -(-self.size // WEIGHTS_CHUNK_BYTES)):
            raise SchemaError(f"chunks: {len(self.chunks)} for {self.size} bytes")
        if len(self.sha256) != 32:
            raise SchemaError(f"sha256: {len(self.sha256)} bytes; it has 32")
        if not all(before < after for before, after in itertools.pairwise(self.chunks)):
            raise SchemaError("chunks: their sequences do not ascend")


def weights_location(seq: int) -> str:
    """Return what a policy record says of weights whose head is at `seq` of WEIGHTS."""
    return f"{WEIGHTS_LOCATION}{seq}"


def head_seq(location: str) -> int | None:
    """Return the sequence of the head that a policy record names; None where it names a file.

    Raises `SchemaError` where it names neither.
    """
    if not location.startswith(WEIGHTS_LOCATION):
        return None
    text = location.removeprefix(WEIGHTS_LOCATION)
    if not (text.isascii() and text.isdecimal() and len(text) <= 18 and int(text)):
        raise SchemaError(f"weights: {location[:80]!r} is no file and names no message of the stream")
    return int(text)
