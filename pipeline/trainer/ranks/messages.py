"""The messages between rank 0 and the others: one JSON message a line, over TCP.

A connection says more than its messages: it ends, at once, with the process at its other end, however that dies.
"""

from __future__ import annotations

from typing import TypeAlias

import anyio
import msgspec
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline.trainer.ranks.join import RankStart

__all__ = [
    "GONE",
    "Alive",
    "Fetched",
    "GatherOptimizer",
    "Hello",
    "JoinRun",
    "Message",
    "NoMemory",
    "RankStream",
    "Stop",
    "TrainNext",
]

_MAX_MESSAGE_BYTES = 1 << 20
GONE = (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What a stream raises whose other end has gone."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank's first message; `token` is what rank 0 gave out through the store."""

    rank: int
    token: str


class JoinRun(msgspec.Struct, frozen=True, tag=True):
    """Join what rank 0 begins with."""

    start: RankStart


class TrainNext(msgspec.Struct, frozen=True, tag=True):
    """Train the next batch of the ledger, which is in the entry of this index and digest."""

    index: int
    digest: str


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A rank has its share of the batch in the entry of this index."""

    index: int


class GatherOptimizer(msgspec.Struct, frozen=True, tag=True):
    """Take part in collecting the optimizer's state."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """This rank's process runs, whatever it computes."""


class NoMemory(msgspec.Struct, frozen=True, tag=True):
    """This rank alone ran out of memory where a step cannot be begun again, and ends; `text` says in what."""

    text: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End: the trainer has."""


Message: TypeAlias = Alive | Hello | JoinRun | TrainNext | Fetched | GatherOptimizer | NoMemory | Stop


class RankStream:
    """Messages over a connection."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._received = BufferedByteReceiveStream(stream)
        self._sending = anyio.Lock()

    async def send(self, message: Message) -> None:
        """Send a message. Raises one of `GONE`."""
        async with self._sending:
            await self._stream.send(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Message:
        """Return the next message. Raises one of `GONE`, and `DecodeError` for what is none."""
        line = await self._received.receive_until(b"\n", _MAX_MESSAGE_BYTES)
        message: Message = msgspec.json.decode(line, type=Message)
        return message
