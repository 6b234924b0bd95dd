"""Reads the record of a run's trimmed history and of its holds, and copies it into the run's folder.

The copy holds what cannot be found out from anything else, in case the bucket loses the record: what was lost before.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.api import Bus, Entry
from lachesis.pipeline.common.disk import DeferredFile
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import StoredValueError
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError, VersionError
from lachesis.schemas.retention import Retention
from lachesis.schemas.values import from_json

__all__ = ["RETENTION_FILE", "decode_record", "follow_record", "read_copy", "read_record", "reading_instead"]

log = logging.getLogger("lachesis")

RETENTION_FILE: Final = "retention.json"
"""In the run's folder: the newest record that the supervisor saw."""
_instead: ContextVar[Retention | None] = ContextVar("instead", default=None)


async def read_record(bus: Bus, run: str) -> Retention:
    """Return the run's record; an empty one where nothing was trimmed or held yet.

    Raises `StoredValueError`.
    """
    if (record := _instead.get()) is not None:
        return record
    entry = await bus.value(keys.RETENTION)
    return decode_record(entry, run)


def decode_record(entry: Entry | None, run: str) -> Retention:
    """Return what the key holds. Raises `StoredValueError`, which names the key."""
    if entry is None:
        return Retention(run=run)
    place = f"the key {keys.RETENTION!r} of run {run}, which says what was trimmed of its history and what is held back"
    try:
        return decode(Retention, entry.value)
    except VersionError as error:
        raise VersionError(
            f"{place}: {error}. If the run was upgraded, install that version here, too; if it was not, {_cure(run)}",
            error.version,
        ) from error
    except SchemaError as error:
        raise StoredValueError(f"{place}, cannot be read: {error}. To mend it, {_cure(run)}") from error


@contextmanager
def reading_instead(record: Retention) -> Iterator[None]:
    """Let this task, and the tasks that it starts, read `record` instead of what the key holds."""
    token = _instead.set(record)
    try:
        yield
    finally:
        _instead.reset(token)


async def follow_record(bus: Bus, run: str, folder: Path, file: DeferredFile) -> None:
    """Keep a copy of the newest record in a file of a run's folder, until cancelled.

    What it listed once stays in the copy, also if the bucket loses the record and another one begins.
    """
    copy = await anyio.to_thread.run_sync(read_copy, folder, run)
    async with bus.watch(keys.RETENTION) as entries:
        async for entry in entries:
            try:
                record = decode(Retention, entry.value)
            except SchemaError as error:
                log.warning("the key %r cannot be read: %s", keys.RETENTION, error)
                continue
            if record.run != run:
                log.warning("the key %r holds a record of run %r, not of %r", keys.RETENTION, record.run, run)
                continue
            copy = record.with_lists_of(copy)
            file.write(msgspec.json.encode(copy))


def read_copy(folder: Path, run: str) -> Retention:
    """Return the copy in a run's folder; an empty record where there is none that can be read."""
    try:
        record = from_json(RETENTION_FILE, Retention, read_small_file(folder / RETENTION_FILE))
    except FileNotFoundError:
        return Retention(run=run)
    except (OSError, SchemaError) as error:
        log.warning("%s: %s", folder / RETENTION_FILE, error)
        return Retention(run=run)
    return record if record.run == run else Retention(run=run)


def _cure(run: str) -> str:
    """Return what to do about a record that no build of the run's wrote, or that was damaged."""
    return (
        f"stop the run, and let `lachesis runs recover {run}` write it again from the run's folder and its other "
        "records. The keys of the governor and of the operator alone may write it: make new ones if neither of them did"
    )
