"""Large messages: heads that lie about size, sequences and content, over a stream that answers as JetStream does."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import msgspec
from fuzz.mutate import mutate_msgpack
from fuzz.oracle import Target

from lachesis.pipeline.bus.api import PubAck, StoredMessage
from lachesis.pipeline.bus.blobs import CHUNK_BYTES, BlobStore
from lachesis.pipeline.bus.publisher import Publisher
from lachesis.pipeline.bus.routing import LARGE_HEADER
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.schemas.subjects import rollout

__all__ = ["targets"]


class _Stream:
    def __init__(self) -> None:
        self.stored: dict[int, StoredMessage] = {}

    async def append(self, _: str, subject: str, data: bytes, *, after: int, headers: Mapping[str, str]) -> int:
        del after  # no other process writes here
        return (await self.store(subject, data, headers)).seq

    async def store(self, subject: str, data: bytes, headers: Mapping[str, str]) -> PubAck:
        seq = len(self.stored) + 1
        self.stored[seq] = StoredMessage("ROLLOUTS", subject, seq, data, 0, headers)
        return PubAck("ROLLOUTS", seq, duplicate=False)

    async def fetch(self, _: str, seqs: Sequence[int]) -> AsyncIterator[StoredMessage]:
        for seq in seqs:
            if not 0 < seq < 1 << 63:  # the server answers a request that is none, and that is no "not found"
                raise InfrastructureError(f"sequence {seq}: invalid request")
            if seq not in self.stored:
                raise NotFoundError(f"sequence {seq}")
            yield self.stored[seq]


_STREAM = _Stream()
_BLOBS = BlobStore(cast("Publisher", _STREAM), _STREAM.fetch)
_WHOLE = random.Random(0).randbytes(2 * CHUNK_BYTES + 100)


def targets() -> list[Target]:
    """Return the target; its seed is the head of a message of three chunks."""
    ack = asyncio.run(_BLOBS.store(rollout("r", "sums"), _WHOLE, {}))
    head = _STREAM.stored[ack.seq].data
    chunks, size, _ = msgspec.msgpack.decode(head)
    part = _STREAM.stored[chunks[0]].data * 64
    repeated = [[chunks[0]] * 64, len(part), hashlib.sha256(part).digest()]  # 32 MiB out of 512 KiB
    del part
    return [
        Target(
            "large.head",
            [head, msgspec.msgpack.encode([chunks, size + 1, b""]), msgspec.msgpack.encode(repeated)],
            mutate_msgpack,
            lambda data: _feed(ack.seq, data),
        )
    ]


def _feed(seq: int, data: bytes) -> None:
    good = _STREAM.stored[seq]
    joined = asyncio.run(_BLOBS.join(StoredMessage(good.stream, good.subject, seq, data, 0, good.headers)))
    assert LARGE_HEADER not in joined.headers
    assert joined.data == _WHOLE, "other data than was stored"
