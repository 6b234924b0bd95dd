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

from lachesis.pipeline.bus.acknowledged import Acknowledgement, digest_of
from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.newer_writers import confirm_newer_value
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.pipeline.bus.server_waits import BELIEVE_LOSS_S
from lachesis.pipeline.errors import HistoryLostError, LedgerError, NotFoundError
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.schemas import keys
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.errors import SchemaError, VersionError

__all__ = [
    "ASK_AGAIN_S",
    "BELIEVE_LOSS_S",
    "MARKS_HEADER",
    "MAX_LOST",
    "StreamMarks",
    "check_marks",
    "contradiction",
    "describe_count",
    "describe_lost_bytes",
    "has_lost_after",
    "is_known_lost",
    "recovery_hint",
]

MARKS_HEADER: Final = "Lachesis-Read"
"""Header of a ledger entry: the marks of the batcher when it wrote the entry."""

_LOST_HINT: Final = (
    "acknowledged messages in it are gone: look at the server's log and its disk, and restore its store from a backup"
)
ASK_AGAIN_S = 0.5
MAX_LOST: Final = 1 << 20
"""Messages that a stream is believed to have lost at its end. A mark beyond that is not believed."""
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


def recovery_hint(run: str) -> str:
    """Return how to go on after the server lost history."""
    return (
        f"Nothing was written. `lachesis runs recover {run}` makes the run go on with what is left, and says before "
        "what that costs; a backup of the server's store that holds all streams of one moment may cost less"
    )


def describe_lost_bytes(lost: Mapping[str, int]) -> str | None:
    """Describe what the server could not read of its store when it started, None where it could read all.

    `lost`: bytes by stream (`api.StreamUsage.lost_bytes`).
    """
    named = ", ".join(f"{size} bytes of stream {stream}" for stream, size in lost.items() if size)
    return f"the server could not read {named} when it started; {_LOST_HINT}" if named else None


async def check_marks(
    bus: Bus, run: str, marks: Mapping[str, StreamMark], *, writer: str, patience_s: float | None = None
) -> None:
    """Raise `HistoryLostError` if a message that `marks` name was replaced, or is gone without a trim.

    Raises `LedgerError` where they name one that no stream ever held.

    `writer`: what names the marks, for the text. A leader that was cut off may give old answers for some seconds, so
    the question is repeated for as long, or for `patience_s`.
    """
    for stream, mark in marks.items():
        until = anyio.current_time() + (BELIEVE_LOSS_S if patience_s is None else patience_s)
        while (problem := await contradiction(bus, run, stream, mark)) is not None:
            if mark.seq > (await bus.usage(stream)).last + MAX_LOST:
                raise LedgerError(
                    f"{writer} names sequence {mark.seq} of {stream}, which never held so many messages: "
                    f"{problem}. {recovery_hint(run)}"
                )
            if anyio.current_time() >= until:
                raise HistoryLostError(
                    f"{writer} has read stream {stream} up to sequence {mark.seq}, but {problem}: the broker lost "
                    f"history that it had acknowledged, or its store was replaced by an older one. {recovery_hint(run)}"
                )
            await anyio.sleep(ASK_AGAIN_S)


async def contradiction(
    bus: Bus, run: str, stream: str, mark: StreamMark | Acknowledgement, *, vanishes: bool = False
) -> str | None:
    """Return how the stream contradicts a mark, None if it does not.

    `vanishes`: the message may have been deleted without a record. What a recovery noted as lost contradicts nothing.
    """
    problem = await _contradiction(bus, run, stream, mark, vanishes=vanishes)
    return None if problem is not None and await is_known_lost(bus, run, stream, mark.seq) else problem


async def is_known_lost(bus: Bus, run: str, stream: str, seq: int) -> bool:
    """Whether `lachesis runs recover` noted that what was stored at `seq` is lost."""
    try:
        return (await read_record(bus, run)).is_lost(stream, seq)
    except SchemaError:
        return False


async def has_lost_after(bus: Bus, run: str, stream: str, seq: int) -> bool:
    """Whether `lachesis runs recover` noted that something stored after `seq` is lost."""
    try:
        lost = (await read_record(bus, run)).lost.get(stream, [])
    except SchemaError:
        return False
    return any(one.last > seq for one in lost)


async def _contradiction(
    bus: Bus, run: str, stream: str, mark: StreamMark | Acknowledgement, *, vanishes: bool
) -> str | None:
    try:
        stored = await bus.get_head(stream, mark.seq, leader=True)
    except NotFoundError:
        last = (await bus.usage(stream)).last
        if last < mark.seq:
            return f"it ends at sequence {last}: {describe_count(mark.seq - last)} gone"
        return None if vanishes else await _unless_trimmed(bus, run, stream, mark.seq)
    return None if _is_it(stored, mark) else "another message is stored there now"


def describe_count(messages: int) -> str:
    """Say that so many messages are, before what they are."""
    return "one acknowledged message is" if messages == 1 else f"{messages} acknowledged messages are"


def _is_it(stored: StoredMessage, mark: StreamMark | Acknowledgement) -> bool:
    if isinstance(mark, StreamMark):
        return stored.time_ns == mark.stored_ns
    return digest_of(stored.headers.get(MSG_ID_HEADER, "")) == mark.digest


async def _unless_trimmed(bus: Bus, run: str, stream: str, seq: int) -> str | None:
    """Return what is wrong with a message that is gone, None if it was trimmed."""
    try:
        below = (await read_record(bus, run)).trimmed.get(stream, 1)
    except SchemaError as error:
        if isinstance(error, VersionError):
            await confirm_newer_value(bus, run, keys.RETENTION, error)
        return f"that message is gone, and whether it was trimmed is not known: {error}"
    return None if seq < below else f"that message is gone, and history was trimmed below sequence {below} alone"
