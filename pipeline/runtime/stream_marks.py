"""Remembers the newest message that a writer read of each stream, and checks that it is still there.

A writer stores its marks with what it derived: in each commit, in each snapshot and in each ledger entry. A store that
lost its end, or was replaced by an older copy, then contradicts them at the next start, also if new messages have taken
the old sequences since: they were stored at another time. A message that is gone counts as trimmed only if the run's
retention record says that history was trimmed so far.
"""

from collections.abc import Mapping
from typing import Final

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.newer_writers import confirm_newer_value
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.schemas import keys
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.errors import HistoryLostError, NotFoundError, SchemaError, VersionError

__all__ = ["MARKS_HEADER", "StreamMarks", "check_marks", "describe_lost_bytes"]

MARKS_HEADER: Final = "Lachesis-Read"
"""Header of a ledger entry: the marks of the batcher when it wrote the entry."""
RESTORE_HINT: Final = (
    "Nothing was written. Restore the server's store from a backup that holds all streams of one moment, or start a "
    "new run (its `model` may be a checkpoint of this one)"
)
_LOST_HINT: Final = (
    "acknowledged messages in it are gone: look at the server's log and its disk, and restore its store from a backup"
)
_BELIEVE_LOSS_S = 12.0  # longer than a leader without a majority stays one
_ASK_AGAIN_S = 0.5
_decoder = msgspec.json.Decoder(dict[str, StreamMark])


class StreamMarks:
    """The newest message read of each stream."""

    def __init__(self, marks: Mapping[str, StreamMark] | None = None) -> None:
        self._newest = dict(marks or {})

    def record(self, message: StoredMessage) -> None:
        """Remember `message` if it is the newest of its stream."""
        known = self._newest.get(message.stream)
        if known is None or message.seq > known.seq:
            self._newest[message.stream] = StreamMark(message.seq, message.time_ns)

    @property
    def newest(self) -> dict[str, StreamMark]:
        """A copy of the marks, by stream."""
        return dict(self._newest)

    def to_header(self) -> str:
        """Return the marks as a header's value."""
        return msgspec.json.encode(self._newest).decode()

    @classmethod
    def from_header(cls, value: str | None) -> "StreamMarks":
        """Return the marks in a header's value; none where there is no header. Raises `SchemaError`."""
        if not value:
            return cls()
        try:
            return cls(_decoder.decode(value))
        except msgspec.MsgspecError as error:
            raise SchemaError(f"header {MARKS_HEADER}: {error}") from error


def describe_lost_bytes(lost: Mapping[str, int]) -> str | None:
    """Describe what the server could not read of its store when it started, None where it could read all.

    `lost`: bytes by stream (`api.StreamUsage.lost_bytes`).
    """
    named = ", ".join(f"{size} bytes of stream {stream}" for stream, size in lost.items() if size)
    return f"the server could not read {named} when it started; {_LOST_HINT}" if named else None


async def check_marks(bus: Bus, run: str, marks: Mapping[str, StreamMark], *, writer: str) -> None:
    """Raise `HistoryLostError` if a message that `marks` name was replaced, or is gone without a trim.

    `writer`: what names the marks, for the text. A leader that was cut off may speak of the past for some seconds, so
    the question is repeated for as long.
    """
    for stream, mark in marks.items():
        until = anyio.current_time() + _BELIEVE_LOSS_S
        while (problem := await _contradiction(bus, run, stream, mark)) is not None:
            if anyio.current_time() >= until:
                raise HistoryLostError(
                    f"{writer} has read stream {stream} up to sequence {mark.seq}, but {problem}: the broker lost "
                    f"history that it had acknowledged, or its store was replaced by an older one. {RESTORE_HINT}"
                )
            await anyio.sleep(_ASK_AGAIN_S)


async def _contradiction(bus: Bus, run: str, stream: str, mark: StreamMark) -> str | None:
    """Return how the stream contradicts a mark, None if it does not."""
    try:
        stored = await bus.get_head(stream, mark.seq)
    except NotFoundError:
        last = (await bus.usage(stream)).last
        if last < mark.seq:
            return f"it ends at sequence {last}"
        try:
            below = (await read_record(bus, run)).trimmed.get(stream, 1)
        except SchemaError as error:
            if isinstance(error, VersionError):
                await confirm_newer_value(bus, run, keys.RETENTION, error)
            return f"that message is gone, and whether it was trimmed is not known: {error}"
        if mark.seq < below:
            return None
        return f"that message is gone, and history was trimmed below sequence {below} alone"
    if stored.time_ns != mark.stored_ns:
        return "another message is stored there now"
    return None
