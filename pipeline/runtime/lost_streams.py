"""Checks whether the streams of a run are those that it has stored its history in.

A stream is identified by the time at which the server made it: one that was deleted and made again, or that belongs to
another store, has another time. The key `store` holds those times, so a missing stream is noticed. The folder of a run
holds them too (`services.run.store`), so that a missing store is noticed as well.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import anyio

from lachesis.pipeline.bus.api import Bus, StreamUsage
from lachesis.pipeline.errors import DamagedError, FencedError, HistoryLostError, NotFoundError, leaves
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import keys
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import StoreRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.subjects import BUCKET, LEDGER, STREAMS, stream_name

__all__ = [
    "StreamWatch",
    "describe_lost_streams",
    "find_streams",
    "read_store_record",
    "refuse_lost_streams",
    "to_record",
    "write_store_record",
]

_PERIOD_S = 1.0
_BELIEVE_S = 4.0
"""A stream that was missed for so long is gone: a cluster's new leader may not know all of them at once."""
_TOPIC = "streams"
_LOST = "deleted under the run, or its server runs on another store"
_MEND = (
    "stop the run, and restore the server's store; what was acknowledged in the meantime is not in it. If other "
    "streams are left, `lachesis runs recover` makes the run go on with those"
)
_NEVER_EMPTY = (BUCKET, LEDGER)


async def find_streams(bus: Bus, kinds: Iterable[str] = (BUCKET, *STREAMS)) -> dict[str, StreamUsage]:
    """Return by kind those streams of the run that exist. Default: of all, the bucket among them."""
    found: dict[str, StreamUsage | None] = dict.fromkeys(kinds)

    async def find(kind: str) -> None:
        with suppress(NotFoundError):
            found[kind] = await bus.usage(kind)

    try:
        async with anyio.create_task_group() as tasks:  # the requests leave together: both sides wake once for all
            for kind in found:
                tasks.start_soon(find, kind)
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from group  # what one request meets, the others meet too
    return {kind: usage for kind, usage in found.items() if usage is not None}


def to_record(run: str, found: Mapping[str, StreamUsage]) -> StoreRecord:
    """Return the record of the streams that were found."""
    return StoreRecord(
        run=run,
        streams={kind: usage.created for kind, usage in found.items()},
        filled=[kind for kind, usage in found.items() if usage.last],
    )


async def read_store_record(bus: Bus, run: str) -> StoreRecord:
    """Return what the key holds; an empty record where there is none, or none that can be read.

    A record that cannot be read is as if there were none: it protects history, and holds none.
    """
    try:
        entry = await bus.value(keys.STORE)
        record = None if entry is None else decode(StoreRecord, entry.value)
    except (NotFoundError, SchemaError, DamagedError):
        record = None
    return record if record is not None and record.run == run else StoreRecord(run=run, streams={})


async def write_store_record(bus: Bus, record: StoreRecord) -> None:
    """Store the record, unless it is stored. Another process that stores one meanwhile stores the same."""
    if await read_store_record(bus, record.run) == record:
        return
    with suppress(FencedError):
        entry = await bus.value(keys.STORE)
        await bus.put(keys.STORE, encode(record), revision=entry.revision if entry else 0)


def describe_lost_streams(record: StoreRecord, found: Mapping[str, StreamUsage]) -> str | None:
    """Return what of the streams that a run had is not there any more, None where all are. Pure."""
    run, remembered = record.run, record.streams
    gone = [stream_name(run, kind) for kind in remembered if kind not in found]
    other = [
        f"{stream_name(run, kind)} (made {found[kind].created}, the run's {made})"
        for kind, made in remembered.items()
        if kind in found and found[kind].created != made
    ]
    emptied = [
        stream_name(run, kind)
        for kind in record.filled
        if kind in found and _is_emptied(kind, found[kind]) and found[kind].created == remembered.get(kind)
    ]
    parts = []
    if gone and len(gone) == len(remembered):
        parts.append(f"none of the streams of run {run} is there any more")
    elif gone:
        parts.append(f"{', '.join(gone)} of run {run} {'is' if len(gone) == 1 else 'are'} not there any more")
    if other:
        parts.append(f"other streams are there under the names of the run's: {', '.join(other)}")
    if emptied:
        parts.append(f"all messages of {', '.join(emptied)} are gone: the files that held them were deleted")
    return "; ".join(parts) or None


def _is_emptied(kind: str, usage: StreamUsage) -> bool:
    """Return whether a stream that has held messages lost them all; others than those named may be trimmed to none."""
    return not usage.last or (kind in _NEVER_EMPTY and not usage.messages)


async def refuse_lost_streams(service: Service) -> None:
    """Raise `HistoryLostError` if a stream of the run is gone or replaced, and stays so for some seconds."""
    record = await read_store_record(service.bus, service.run)
    until_s = anyio.current_time() + _BELIEVE_S
    while (lost := describe_lost_streams(record, await find_streams(service.bus))) is not None:
        _report_lost(service, lost)
        if anyio.current_time() >= until_s:
            raise HistoryLostError(f"{lost}: {_LOST}; {_MEND}")
        await anyio.sleep(_PERIOD_S)
    _report_lost(service, None)


def _report_lost(service: Service, lost: str | None) -> None:
    service.set_problem(_TOPIC, lost, why=_LOST, mend=_MEND, held_up=["every service"], stops=True)


class StreamWatch:
    """Says when a stream of a running run is gone or replaced. Use `open`."""

    def __init__(self, service: Service, record: StoreRecord) -> None:
        self._service = service
        self._record = record
        self._missed_s: float | None = None

    @classmethod
    async def open(cls, service: Service) -> "StreamWatch":
        """Return the watch. Without a record there is nothing to compare."""
        return cls(service, await read_store_record(service.bus, service.run))

    def check(self, found: Mapping[str, StreamUsage]) -> None:
        """Compare the streams that were found just now. Raises `HistoryLostError` once a loss is certain."""
        lost = describe_lost_streams(self._record, found) if self._record.streams else None
        _report_lost(self._service, lost)
        if lost is None:
            self._missed_s = None
            return
        self._missed_s = self._missed_s or anyio.current_time()
        if anyio.current_time() - self._missed_s >= _BELIEVE_S:
            raise HistoryLostError(f"{lost}: {_LOST}; {_MEND}")
