"""Settles which tasks a run holds out over all its starts, by a record in its bucket.

Guarantees that the record is stored before the first task is drawn by it, and that every process that reads it, before
or after that, chooses the same tasks.
"""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import FencedError, StoredValueError
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.runtime.stored_values import decode_value
from lachesis.pipeline.tasks.held_out import ANY_RANK, HeldOutRule, HeldOutSplit
from lachesis.pipeline.tasks.item_keys import Keys
from lachesis.schemas import keys
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import HeldOutRecord
from lachesis.schemas.errors import ConfigError, SchemaError, VersionError

__all__ = ["keep_record", "kept_record", "read_held_out", "settle_held_out"]

log = logging.getLogger("lachesis")


async def read_held_out(service: Service, env: str) -> HeldOutRecord | None:
    """Return the record of an environment's tasks that earlier starts held out; None before the first."""
    entry: Entry | None = await service.retrying(f"read {keys.held_out(env)}")(service.bus.value, keys.held_out(env))
    return decode_value(HeldOutRecord, entry, keys.held_out(env))


def keep_record(run: Path, env: str, record: HeldOutRecord | None) -> None:
    """Keep a copy in the run's folder for commands that measure without the run's server."""
    if record is not None and run.is_dir():
        try:
            replace_file(_copy(run, env), encode(record))
        except OSError as error:
            log.info("no copy of %s is kept: %s", keys.held_out(env), error)


def kept_record(run: Path, env: str) -> HeldOutRecord | None:
    """Return the copy that `keep_record` made; None without one.

    Raises `StoredValueError`, with its name, for one that is damaged, and `ConfigError` for one that cannot be read:
    without it, tasks might be held out that were trained on.
    """
    file = _copy(run, env)
    try:
        return decode(HeldOutRecord, read_small_file(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{file} says which tasks are held out, and cannot be read: {error}") from error
    except VersionError as error:
        raise VersionError(f"{file}: {error}", error.version) from error
    except SchemaError as error:
        raise StoredValueError(f"{file}: {error}. Delete it: the run writes it again when it is started") from error


def _copy(run: Path, env: str) -> Path:
    return run / f"{keys.held_out(env)}.msgpack"


async def settle_held_out(
    service: Service, folder: Path, env: str, rule: HeldOutRule, item_keys: Keys
) -> NDArray[np.int64]:
    """Return the held-out tasks, int64 [n]; the others may be drawn from now on. `folder`: the run's."""
    split: HeldOutSplit = await service.retrying(f"store {keys.held_out(env)}")(
        _try_settle, service, folder, env, rule, item_keys
    )
    keep_record(folder, env, await read_held_out(service, env))
    if split.withheld:
        text = (
            f"environment {env}: {len(split.tasks)} tasks are held out instead of {len(split.tasks) + split.withheld}, "
            "since the others may have been trained on: the tasks, evaluate.held_out or the seed were changed between "
            "two starts of the run"
        )
        log.warning("%s", text)
        service.set_note(f"{env} held out", text)
    return split.tasks


async def _try_settle(service: Service, folder: Path, env: str, rule: HeldOutRule, item_keys: Keys) -> HeldOutSplit:
    key = keys.held_out(env)
    while True:
        entry = await service.bus.value(key)
        record = decode_value(HeldOutRecord, entry, key)
        if record is None:  # a recovery may have put it aside
            record = kept_record(folder, env)
        split = rule.split(item_keys, record)
        before = ANY_RANK if record is None else record.limit
        if entry is not None and split.limit >= before:
            return split
        made = HeldOutRecord(seed=rule.seed if record is None else record.seed, limit=min(split.limit, before))
        try:
            await service.bus.put(key, encode(made), revision=0 if entry is None else entry.revision)
        except FencedError:
            continue  # another process of the environment was quicker
        return split
