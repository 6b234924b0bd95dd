"""Reads the record of a run's trimmed history and of the holds that keep the rest."""

from lachesis.pipeline.bus.api import Bus, Entry
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError, StoredValueError, VersionError
from lachesis.schemas.retention import Retention
from lachesis.schemas.subjects import BUCKET, stream_name, value_subject

__all__ = ["decode_record", "read_record"]


async def read_record(bus: Bus, run: str) -> Retention:
    """Return the run's record; an empty one where nothing was trimmed or held yet.

    Raises `StoredValueError`.
    """
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


def _cure(run: str) -> str:
    """Return what to do about a record that no build of the run's wrote, or that was damaged."""
    purge = f"nats stream purge {stream_name(run, BUCKET)} --subject '{value_subject(run, keys.RETENTION)}'"
    return (
        "restore it from a backup of the server's store; or stop the run, delete the record with "
        f"`{purge}`, and let `lachesis runs recover {run}` write it anew from the run's other records. The keys of the "
        "governor and of the operator alone may write it: make new ones if neither of them did"
    )
