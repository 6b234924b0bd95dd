"""Messages between a replay and its workers: length-prefixed msgpack over pipes.

Nothing of it is stored or read by another build: a worker runs the files of the replay that started it.
"""

from typing import Self, TypeVar

import anyio
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from lachesis.pipeline.bus.config import Connection
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.offline.replay.scoring import ScoreOrReason
from lachesis.pipeline.offline.replay.selected import SelectedRollout

__all__ = [
    "RolloutBlock",
    "WorkerAnswer",
    "WorkerError",
    "WorkerReady",
    "WorkerReply",
    "WorkerStart",
    "frame",
    "read_frame",
]

_LENGTH_BYTES = 4


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a worker: what it scores with, and where.

    `config`: the configuration, encoded. `path`: the folders in which the replay finds modules. `ensembles`: the
    digest of the ensemble that scores each environment.
    """

    config: msgspec.Raw
    ensembles: dict[str, str]
    connection: Connection
    path: list[str]

    @classmethod
    def of(cls, config: RunConfig, ensembles: dict[str, str], connection: Connection, path: list[str]) -> Self:
        """Return the message that hands a configuration over."""
        return cls(
            config=msgspec.Raw(msgspec.msgpack.encode(config)), ensembles=ensembles, connection=connection, path=path
        )

    @property
    def run_config(self) -> RunConfig:
        """The configuration, with the settings of extensions."""
        return msgspec.msgpack.decode(self.config, type=run_config_type())


class RolloutBlock(msgspec.Struct, frozen=True):
    """Every later message: rollouts to be scored."""

    number: int
    wanted: list[SelectedRollout]


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The first answer: it has its raters and its connection."""


class WorkerReply(msgspec.Struct, frozen=True, tag=True):
    """The scores of a block, in its order, and the time that scoring took."""

    number: int
    verdicts: list[ScoreOrReason]
    seconds: float


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """What ends the replay: an error of this project by its name, met at a block or (None) before it was ready."""

    number: int | None
    error: str
    text: str


WorkerAnswer = WorkerReady | WorkerReply | WorkerError

M = TypeVar("M")


def frame(message: msgspec.Struct) -> bytes:
    """Return what travels of a message."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_frame(stream: BufferedByteReceiveStream, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Return the next message; None where the other side has ended."""
    try:
        size = int.from_bytes(await stream.receive_exactly(_LENGTH_BYTES), "big")
        return decoder.decode(await stream.receive_exactly(size))
    except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
        return None
