"""Remembers in a run's folder which streams hold its history; makes none in place of lost ones.

Guarantees that a store that was deleted, in part or whole, or replaced by another one, is never taken for that of a
run that is new: what makes streams compares them first with what the folder and the store's own key remember.
"""

import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.common.fsync import fsync, replace_file
from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.config.run import NATS_FOLDER, RunConfig
from lachesis.pipeline.errors import HistoryLostError, InfrastructureError, StartupError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS
from lachesis.pipeline.runtime.lost_streams import (
    describe_lost_streams,
    find_streams,
    read_store_record,
    to_record,
    write_store_record,
)
from lachesis.pipeline.runtime.store_marks import MARKS_FILE
from lachesis.schemas import subjects
from lachesis.schemas.control import StoreRecord
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.subjects import BUCKET, LEDGER, ROLLOUTS
from lachesis.schemas.values import from_json
from lachesis.services.run.known_runs import has_stored

__all__ = [
    "STORE_FILE",
    "LostStore",
    "check_store",
    "describe_unknown_history",
    "find_lost_store",
    "is_lost",
    "keep_record",
    "make_streams",
    "refuse_foreign_folder",
    "refuse_lost_folder",
    "refuse_unknown_history",
    "ways_out",
]

STORE_FILE = "store.json"
"""In a run's folder: which streams its history is in (`StoreRecord`)."""
_MEMORIES = (STORE_FILE, MARKS_FILE, CHECKPOINTS, "metrics.jsonl")
"""Any of them in a folder says that the run was here."""
_KEEP_S, _MAX_KEEP_S = 1.0, 5.0
"""Between two looks at the streams that are empty so far; longer while they stay empty."""

log = logging.getLogger("lachesis")


class LostStore(NamedTuple):
    """`text`: which streams of a run the server lacks. `is_partial`: it has others, from which the run can go on."""

    text: str
    is_partial: bool
    mend: str


async def make_streams(bus: NatsBus, config: RunConfig, *, takes_over: bool = False) -> list[str]:
    """Create or change the run's streams, and let folder and store remember them.

    See `NatsBus.ensure_streams`. A folder that knows nothing of what is there remembers it only if it `takes_over`.
    Then what is there counts as the run's also in place of streams that are gone.

    Raises `HistoryLostError` where one that the run had is gone, and then changes nothing.
    """
    if not takes_over:
        await check_store(bus, config)
    is_known = takes_over or await describe_unknown_history(bus, config) is None
    lines = await bus.ensure_streams(config.streams)
    record = to_record(config.run, await find_streams(bus))
    await write_store_record(bus, record)
    if is_known and config.path.is_dir():
        await _write(config, record)
    return lines


async def describe_unknown_history(bus: NatsBus, config: RunConfig) -> str | None:
    """Return a message if the server holds history that the run's folder does not know, else None.

    Such a folder is of another machine, or new. For it nothing would show that the server's store is older than the
    run.
    """
    if config.nats is None or any((config.path / name).exists() for name in _MEMORIES):
        return None
    found = await find_streams(bus)
    if LEDGER not in found or not found[LEDGER].last:
        return None
    rollouts = found[ROLLOUTS].messages if ROLLOUTS in found else 0
    return (
        f"{_where(config)} holds history of run {config.run} ({rollouts} rollouts), of which {config.path} knows "
        "nothing: the folder is new, or the run was on another machine. If that store is older than the run, nothing "
        "here can tell"
    )


async def refuse_unknown_history(bus: NatsBus, config: RunConfig) -> None:
    """Raise `HistoryLostError` where steps were trained of which the run's folder knows nothing.

    Of other history that it does not know a warning is logged, and the folder remembers it from now on.
    """
    if (unknown := await describe_unknown_history(bus, config)) is not None:
        report = subjects.state(config.run, "trainer", subjects.LIVE, config.training.name)
        if await bus.last(LEDGER, report) is None:
            log.warning("%s", unknown)
            await make_streams(bus, config, takes_over=True)
            return
        raise HistoryLostError(
            f"{unknown}. Nothing was changed. Put the run's folder there (its checkpoints and what it remembers of the "
            f"store); or `lachesis runs recover {config.run}` takes the server's history as all there is; or begin "
            "another run (--run NAME)"
        )


async def keep_record(bus: NatsBus, config: RunConfig) -> None:
    """Let the folder remember of each stream that it has held messages. Runs until all have."""
    record, pause_s = _read(config), _KEEP_S
    while record is not None and len(record.filled) < len(record.streams) and config.path.is_dir():
        with suppress(InfrastructureError, OSError):
            missing = [kind for kind in record.streams if kind not in record.filled]
            found = to_record(config.run, await find_streams(bus, missing))
            filled = [kind for kind in record.streams if kind in {*record.filled, *found.filled}]
            if filled != record.filled:
                record, pause_s = record.replace(filled=filled), _KEEP_S
                await _write(config, record)
        await sleep_until_tick(pause_s)
        pause_s = min(pause_s + _KEEP_S, _MAX_KEEP_S)


async def check_store(bus: NatsBus, config: RunConfig) -> None:
    """Raise `HistoryLostError` where the server lacks a stream that the folder or the store remembers."""
    lost = await find_lost_store(bus, config)
    if lost is not None:
        raise HistoryLostError(f"{lost.text}. Nothing was changed. {lost.mend}")


async def find_lost_store(bus: NatsBus, config: RunConfig) -> LostStore | None:
    """Return which streams the server lacks that folder or store remember, None where it lacks none."""
    found = await find_streams(bus)
    of_store = await read_store_record(bus, config.run) if BUCKET in found else None
    for record in (_read(config), of_store):
        lost = None if record is None else describe_lost_streams(record, found)
        if record is not None and lost is not None:
            is_partial = any(
                usage.messages and usage.created == record.streams.get(kind) for kind, usage in found.items()
            )
            return LostStore(f"{_where(config)}: {lost}", is_partial, ways_out(config.run, is_partial=is_partial))
    if found and BUCKET not in found:  # it is made first and deleted last
        text = f"{_where(config)} has streams of run {config.run}, and not the bucket with its keys"
        is_partial = any(usage.messages for usage in found.values())
        return LostStore(text, is_partial, ways_out(config.run, is_partial=is_partial))
    return None


def is_lost(config: RunConfig) -> bool:
    """Return whether a run with its own server has stored history, and its whole store is gone."""
    if config.nats is not None or (config.path / NATS_FOLDER / "jetstream").is_dir():
        return False
    return (config.path / STORE_FILE).exists() or has_stored(config.path)


def refuse_lost_folder(config: RunConfig) -> None:
    """Raise `HistoryLostError` where a run with its own server stored history in a folder that is gone."""
    if is_lost(config) and not (config.path / STORE_FILE).exists():  # with it, the streams that are gone are named
        raise HistoryLostError(
            f"run {config.run} has stored history in {config.path}, and that is gone: the folder was deleted, moved, "
            f"or its disk is not mounted. Nothing was changed. {ways_out(config.run)}"
        )


def refuse_foreign_folder(config: RunConfig) -> None:
    """Raise `StartupError` where the run's folder is another run's, whose history would be mixed in.

    A record that cannot be read names no other run.
    """
    try:
        record = _record(config)
    except StartupError:
        return  # what needs the record raises it; a deletion does not
    if record is not None and record.run != config.run:
        raise StartupError(
            f"{config.path} is the folder of run {record.run}, not of {config.run}: the folders of two runs were "
            "exchanged, or one was put in the place of another. Nothing was changed. Put each folder where its run is "
            f"looked for; or name the run that this one is of (--run {record.run})"
        )


def ways_out(run: str, *, is_partial: bool = False) -> str:
    """Return what a person can do where history is gone. `is_partial`: streams with messages are left."""
    go_on = (
        f"or `lachesis runs recover {run}` makes the run go on with what is left, and says before what that costs; "
        if is_partial
        else ""
    )
    return (
        f"Put the store back (the disk, the server's own folder, a backup); {go_on}or begin another run (--run NAME, "
        f"its `model` may be a checkpoint of this one); or give this one up: `lachesis runs delete {run}` deletes what "
        "is left of it, its checkpoints too, and then `lachesis up` begins again"
    )


def _where(config: RunConfig) -> str:
    if config.nats is not None:
        return f"the server at {without_secrets(config.nats.url)}"
    return f"the store in {config.path / NATS_FOLDER}"


def _read(config: RunConfig) -> StoreRecord | None:
    """Return what the folder remembers. Raises `StartupError` where that is not known, or is of another run."""
    refuse_foreign_folder(config)
    return _record(config)


def _record(config: RunConfig) -> StoreRecord | None:
    file = config.path / STORE_FILE
    try:
        return from_json(STORE_FILE, StoreRecord, read_small_file(file))
    except (FileNotFoundError, NotADirectoryError):  # there is no such folder, either
        return None
    except OSError as error:
        raise StartupError(
            f"{file}, which says which store the run's history is in, cannot be read: {error.strerror}; mend that, and "
            "start the run again: the file stays"
        ) from error
    except SchemaError as error:
        raise StartupError(
            f"{file}, which says which store the run's history is in, cannot be read ({error}): if the store is the "
            "right one, delete this file"
        ) from error


async def _write(config: RunConfig, record: StoreRecord) -> None:
    file = config.path / STORE_FILE
    if not file.exists() or _read(config) != record:
        content = msgspec.json.format(msgspec.json.encode(record))
        await write_when_room(file, partial(_replace, file, content), needed_bytes=len(content))


def _replace(file: Path, content: bytes) -> None:
    replace_file(file, content)
    fsync(file.parent)
