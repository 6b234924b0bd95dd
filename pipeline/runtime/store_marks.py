"""Writes down how far each of a run's streams goes, and finds those that went back since.

A stream that lost its end, or that an older copy replaced, answers like one that never went further, and new messages
take the old sequences. So the governor writes marks (`StoreMarks`) of all streams and of the bucket, into the bucket
each second in which something was stored and into LEDGER every few seconds; `lachesis up` keeps a copy in the run's
folder. None of the three is believed alone: what any of them names must be there, be trimmed, or be known as lost.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.acknowledged import Acknowledgement, read_acknowledged
from lachesis.pipeline.bus.api import Bus, StreamUsage
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.common.disk import DeferredFile
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import DamagedError, HistoryLostError, NotFoundError
from lachesis.pipeline.runtime import stream_marks
from lachesis.pipeline.runtime.lost_streams import find_streams
from lachesis.pipeline.runtime.retention_record import read_record
from lachesis.pipeline.runtime.stream_marks import contradiction
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import StreamMark
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.store_marks import StoreMarks
from lachesis.schemas.subjects import BUCKET, LEDGER, ROLLOUTS, STREAMS
from lachesis.schemas.values import from_json

__all__ = [
    "MARKS_FILE",
    "Contradiction",
    "EndWatch",
    "MarkWriter",
    "NamedMarks",
    "describe_contradictions",
    "find_lost_acknowledged",
    "find_rollbacks",
    "follow_marks",
    "read_marks",
    "refuse_lost_ends",
]

log = logging.getLogger("lachesis")

MARKS_FILE: Final = "store-marks.json"
"""In the run's folder: the newest marks that the supervisor saw."""
_LEDGER_EVERY_S = 5.0
_MAX_NAMED: Final = 8
_PASSING: Final = (keys.attempts("", "").partition(".")[0] + ".", keys.SUPERVISOR)
"""Begin keys that may be deleted: in the course of a run, or by a person."""
_MAX_COUNT: Final = 1 << 53
"""Marks that a run never writes so many of: a higher count was forged."""


class Contradiction(NamedTuple):
    """`source` names the message at `seq` of a stream, stored before Unix time `before_ns`, and `problem` is so.

    `first`: all from there to `seq` are gone, while what was stored after them is there; 0: it is no such hole.
    """

    stream: str
    seq: int
    before_ns: int
    source: str
    problem: str
    first: int = 0

    def __str__(self) -> str:
        if self.first:
            return f"{self.source} lacks sequences {self.first} to {self.seq}, {self.problem}"
        return f"{self.source} names sequence {self.seq} of {self.stream}, but {self.problem}"


async def find_lost_acknowledged(bus: Bus, run: str, folder: Path) -> list[Contradiction]:
    """Return what streams lack of what the run's folder says was acknowledged to its processes."""
    marks: dict[Acknowledgement, str] = {}
    for writer, acks in await anyio.to_thread.run_sync(read_acknowledged, folder):
        marks |= {ack: writer for ack in acks if ack.stream in (BUCKET, *STREAMS)}
    found = []
    for ack, writer in marks.items():
        with suppress(NotFoundError):  # the stream is not there, which is said elsewhere
            problem = await contradiction(bus, run, ack.stream, ack, vanishes=True)
            if problem is not None:
                source = f"the process {writer}, to which it was acknowledged,"
                found.append(Contradiction(ack.stream, ack.seq, ack.acked_ns, source, problem))
    return found


class NamedMarks(NamedTuple):
    """Marks, and where they were found."""

    source: str
    marks: StoreMarks


async def read_marks(bus: Bus, run: str, folder: Path | None) -> list[NamedMarks]:
    """Return the marks in the bucket, in LEDGER and in the run's folder.

    Those that are not there or cannot be read are left out.
    """
    found: list[NamedMarks] = []
    in_bucket = await _in_bucket(bus)
    if in_bucket is not None:
        found.append(NamedMarks(f"the key {keys.MARKS!r} of the bucket", in_bucket))
    in_ledger, _, _ = await read_last_event(
        bus, LEDGER, subjects.marks(run), StoreMarks, lambda one: one.run == run, newer="skip"
    )
    if in_ledger is not None:
        found.append(NamedMarks("the record of the streams in LEDGER", in_ledger))
    in_folder = _in_folder(folder, run) if folder is not None else None
    if in_folder is not None:
        found.append(NamedMarks(f"{MARKS_FILE} in the run's folder", in_folder))
    return found


async def refuse_lost_ends(bus: Bus, run: str, *, folder: Path, known: StoreMarks | None = None) -> None:
    """Raise `HistoryLostError` if a stream or the bucket went back behind marks or what is `known`.

    A leader that was cut off may give old answers for some seconds, so the question is repeated for as long.
    """
    until = anyio.current_time() + stream_marks.BELIEVE_LOSS_S
    while True:
        marks = await read_marks(bus, run, folder)
        if known is not None:
            marks.append(NamedMarks("the governor", known))
        found = await find_rollbacks(bus, run, marks) + await find_lost_acknowledged(bus, run, folder)
        if not found:
            return
        if anyio.current_time() >= until:
            raise HistoryLostError(
                f"the streams of run {run} do not fit each other: {describe_contradictions(found)}. The broker lost "
                "history that it had acknowledged, or a part of its store was replaced by an older copy. "
                f"{stream_marks.recovery_hint(run)}"
            )
        await anyio.sleep(stream_marks.ASK_AGAIN_S)


def describe_contradictions(found: Iterable[Contradiction]) -> str:
    """Return which streams lack what, one reason for each stream."""
    by_stream = {one.stream: one for one in sorted(found, key=lambda one: one.seq)}
    return "; ".join(str(one) for _, one in sorted(by_stream.items()))


async def find_rollbacks(bus: Bus, run: str, found: Iterable[NamedMarks]) -> list[Contradiction]:
    """Return what streams lack of what `found` names, one for each stream and source."""
    known = list(found)
    problems = []
    for source, marks in known:
        for stream, mark in marks.ends.items():
            if stream == BUCKET:
                continue  # its messages are replaced: see below
            problem = await contradiction(bus, run, stream, mark, vanishes=True)
            if problem is not None:
                problems.append(Contradiction(stream, mark.seq, mark.stored_ns, source, problem))
        if (
            marks.rollout is not None
            and (problem := await contradiction(bus, run, ROLLOUTS, marks.rollout)) is not None
        ):
            problems.append(Contradiction(ROLLOUTS, marks.rollout.seq, marks.rollout.stored_ns, source, problem))
    return [*problems, *await _find_old_bucket(bus, known), *await _find_lost_keys(bus, known)]


async def _find_old_bucket(bus: Bus, known: list[NamedMarks]) -> list[Contradiction]:
    """Return that the bucket is older than others know: each of its marks has a higher count than all before."""
    in_bucket = await _in_bucket(bus)
    count = in_bucket.count if in_bucket is not None else 0
    found = []
    for source, marks in known:
        end = marks.ends.get(BUCKET)
        if marks.count > count and end is not None:
            problem = f"its newest record of the streams is number {count}, where {marks.count} was written"
            found.append(Contradiction(BUCKET, end.seq, end.stored_ns, source, problem))
    return found


async def _find_lost_keys(bus: Bus, known: list[NamedMarks]) -> list[Contradiction]:
    """Return which keys are gone: a server that lost a part of the bucket goes on with the rest without an error."""
    named = {key for _, marks in known for key in marks.keys}
    gone = named - set(await bus.stored_keys()) if named else set()
    found = []
    for source, marks in known:
        end, missed = marks.ends.get(BUCKET), sorted(gone.intersection(marks.keys))
        if end is not None and missed:
            more = f" and {len(missed) - _MAX_NAMED} more" if len(missed) > _MAX_NAMED else ""
            problem = f"of its keys these are gone: {', '.join(missed[:_MAX_NAMED])}{more}"
            found.append(Contradiction(BUCKET, end.seq, end.stored_ns, source, problem))
    return found


class MarkWriter:
    """The writer of the marks. Use `open`."""

    def __init__(self, bus: Bus, run: str, count: int) -> None:
        self._bus = bus
        self._run = run
        self._count = count
        self._ends: dict[str, StreamMark] = {}
        self._own = 0  # the sequence in LEDGER of the marks written last
        self._ledger_s = float("-inf")
        self._keys: list[str] = []
        self._is_pending = False  # LEDGER does not hold the newest marks
        self.newest: StoreMarks | None = None
        """What was written last."""

    @classmethod
    async def open(cls, bus: Bus, run: str, folder: Path | None = None) -> "MarkWriter":
        """Return the writer, which goes on counting."""
        counts = [one.marks.count for one in await read_marks(bus, run, folder)]
        return cls(bus, run, max((count for count in counts if count < _MAX_COUNT), default=0))

    async def write(
        self, rollout: StreamMark | None, *, found: Mapping[str, StreamUsage] | None = None, now: bool = False
    ) -> None:
        """Write how far the streams go, if any went further; with `now` in any case, and to LEDGER too.

        `rollout`: the newest that was read, None if none is known. `found`: the streams as they were read a moment ago.
        """
        found = await find_streams(self._bus) if found is None else found
        ends = {stream: StreamMark(usage.last, usage.last_ns) for stream, usage in found.items() if usage.last}
        changed = {stream for stream, mark in ends.items() if mark != self._ends.get(stream)} - {BUCKET}
        if changed == {LEDGER} and ends[LEDGER].seq == self._own:
            changed = set()
        is_due = now or anyio.current_time() >= self._ledger_s + _LEDGER_EVERY_S
        if not changed and not now and not (self._is_pending and is_due):
            return
        self._count += 1
        if is_due:
            self._keys = [key for key in await self._bus.stored_keys() if not key.startswith(_PASSING)]
        marks = StoreMarks(
            run=self._run,
            count=self._count,
            written_ns=await self._bus.server_time_ns(),
            ends=ends,
            rollout=rollout,
            trimmed=dict((await read_record(self._bus, self._run)).trimmed),
            keys=self._keys,
        )
        data = encode(marks)
        await self._bus.put(keys.MARKS, data)  # first: LEDGER never holds a count that the bucket did not
        self._ends, self._is_pending, self.newest = ends, True, marks
        if is_due:
            msg_id = f"marks.{self._count}.{marks.written_ns}"
            self._own = (await self._bus.publish(subjects.marks(self._run), data, msg_id=msg_id)).seq
            self._ledger_s, self._is_pending = anyio.current_time(), False


class EndWatch:
    """Writes the marks of the streams once a second, and notices a stream that went back meanwhile.

    What the processes of this machine had acknowledged is compared as well, so it covers messages that no process has
    read.
    """

    def __init__(self, bus: Bus, run: str, folder: Path) -> None:
        self._bus = bus
        self._run = run
        self._folder = folder
        self._writer: MarkWriter | None = None
        self._known: StoreMarks | None = None  # the newest marks, written over a connection that was compared
        self._reconnects = bus.reconnects
        self._acknowledged: list[Acknowledgement] = []
        self._explained: set[Acknowledgement] = set()  # of what is known to be lost

    async def read_acknowledged(self) -> None:
        """Read what was acknowledged to the processes of this machine.

        Call it before the streams are looked at.
        """
        files = await anyio.to_thread.run_sync(read_acknowledged, self._folder)
        self._acknowledged = [ack for _, acks in files for ack in acks]

    async def update(self, found: Mapping[str, StreamUsage], rollout: StreamMark | None) -> None:
        """Write how far the streams go that were found, if any went further; first look whether they still do.

        `rollout`: the newest that was read. Raises `HistoryLostError` where a stream does not.
        """
        bus = self._bus
        if self._writer is None:
            self._writer = await MarkWriter.open(bus, self._run, self._folder)
        reconnects = bus.reconnects
        missed = {ack for ack in self._acknowledged if _is_behind(found, ack.stream, ack.seq)} - self._explained
        ends = self._known.ends if self._known is not None else {}
        went_back = any(_is_behind(found, stream, mark.seq) for stream, mark in ends.items())
        if reconnects != self._reconnects or missed or went_back:
            known = self._known or StoreMarks(run=self._run, count=0, written_ns=0, ends={})
            known = msgspec.structs.replace(known, rollout=rollout)  # what was read since counts, too
            await refuse_lost_ends(bus, self._run, folder=self._folder, known=known)
            self._reconnects, found = reconnects, await find_streams(bus)
            self._explained |= missed
        await self._writer.write(rollout, found=found)
        if bus.reconnects == self._reconnects:  # else they may be of a store that went back
            self._known = self._writer.newest


def _is_behind(found: Mapping[str, StreamUsage], stream: str, seq: int) -> bool:
    return stream in found and found[stream].last < seq


async def follow_marks(bus: Bus, file: DeferredFile) -> None:
    """Keep a copy of the newest marks in a file, until cancelled."""
    async with bus.watch(keys.MARKS) as entries:
        async for entry in entries:
            try:
                marks = decode(StoreMarks, entry.value)
            except SchemaError as error:
                log.warning("the key %r cannot be read: %s", keys.MARKS, error)
            else:
                file.write(msgspec.json.encode(marks))


async def _in_bucket(bus: Bus) -> StoreMarks | None:
    try:
        entry = await bus.value(keys.MARKS)
        return decode(StoreMarks, entry.value) if entry is not None else None
    except (DamagedError, SchemaError) as error:
        log.warning("the key %r cannot be read: %s", keys.MARKS, error)
        return None


def _in_folder(folder: Path, run: str) -> StoreMarks | None:
    try:
        marks = from_json(MARKS_FILE, StoreMarks, read_small_file(folder / MARKS_FILE))
    except FileNotFoundError:
        return None
    except (OSError, SchemaError) as error:
        log.warning("%s: %s", folder / MARKS_FILE, error)
        return None
    return marks if marks.run == run else None
