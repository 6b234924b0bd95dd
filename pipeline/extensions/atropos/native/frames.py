"""Frames between the run and an environment's process: four bytes of length, big-endian, and JSON.

Guarantees that each frame read is one of the messages below, of at most `MAX_FRAME_BYTES`; any other is a `DataError`.
"""

import struct
from collections.abc import AsyncIterator
from typing import Any

import anyio
import msgspec
from anyio.abc import ByteReceiveStream

from lachesis.schemas.codec import MAX_ERROR_CHARS, UNREADABLE
from lachesis.schemas.errors import DataError

__all__ = ["ChildMessage", "Generate", "GroupError", "Groups", "Pong", "Ready", "SetupError", "packed", "read_frames"]

MAX_FRAME_BYTES = 256 << 20
"""A group of 64 sequences of 32,768 tokens with logprobs is about 100 MiB of JSON."""
_HEADER = struct.Struct(">I")


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="op"):
    """The environment is set up. `named`: how many items it has by name; `probe`: the tokens of its chat template."""

    named: int | None
    probe: list[int] | None
    normalization: dict[str, Any]


class SetupError(msgspec.Struct, frozen=True, tag="failed", tag_field="op"):
    """The environment could not be made."""

    error: str
    trace: str


class Generate(msgspec.Struct, frozen=True, tag="generate", tag_field="op"):
    """Sample `n` completions of a prompt for group number `group`."""

    id: int
    group: int
    prompt_ids: list[int]
    n: int
    sampling: dict[str, Any]


class Groups(msgspec.Struct, frozen=True, tag="groups", tag_field="op"):
    """The result of request `id`: the groups made of item `index`, or none if the environment made none.

    `digest` names the item's content; None: the environment went on with an item left by an earlier request.
    """

    id: int
    index: int
    name: str | None
    digest: str | None
    groups: list[msgspec.Raw]


class GroupError(msgspec.Struct, frozen=True, tag="error", tag_field="op"):
    """The environment's code raised while it worked on request `id`."""

    id: int
    error: str
    trace: str


class Pong(msgspec.Struct, frozen=True, tag="pong", tag_field="op"):
    """Its event loop runs."""


ChildMessage = Ready | SetupError | Generate | Groups | GroupError | Pong
_decoder: msgspec.json.Decoder[ChildMessage] = msgspec.json.Decoder(ChildMessage)


def packed(**message: Any) -> bytes:
    """Return a frame for the environment's process."""
    data = msgspec.json.encode(message)
    return _HEADER.pack(len(data)) + data


async def read_frames(stream: ByteReceiveStream) -> AsyncIterator[ChildMessage]:
    """Yield the messages until the process closes its end. Raises `DataError` on anything else."""
    data = bytearray()
    try:
        while True:
            while len(data) < _HEADER.size:
                data += await stream.receive()
            (length,) = _HEADER.unpack_from(data)
            if length > MAX_FRAME_BYTES:
                raise DataError(f"a frame of {length} bytes, where {MAX_FRAME_BYTES} are allowed; make groups smaller")
            while len(data) < _HEADER.size + length:
                data += await stream.receive()
            try:
                message = _decoder.decode(memoryview(data)[_HEADER.size : _HEADER.size + length].tobytes())
            except UNREADABLE as error:
                raise DataError(f"a frame that is no message: {str(error)[:MAX_ERROR_CHARS]}") from error
            del data[: _HEADER.size + length]
            yield message
    except (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
        return
