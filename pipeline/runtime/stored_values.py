"""Decodes the value of a key from which a service goes on; says what to do where it is unreadable."""

from typing import TypeVar

from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.errors import StoredValueError
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.errors import SchemaError, VersionError

__all__ = ["decode_value", "unreadable_value"]

E = TypeVar("E", bound=Event)


def decode_value(kind: type[E], entry: Entry | None, key: str) -> E | None:
    """Return what a key holds, None where it holds nothing.

    Raises `StoredValueError`, which names the key and the way on, or `VersionError`: either ends the service.

    The reader writes the key itself, or reads what decides about training: it must not go on as if there were none.
    """
    try:
        return None if entry is None else decode(kind, entry.value)
    except VersionError as error:
        raise VersionError(unreadable_value(key, error), error.version) from error
    except SchemaError as error:
        raise StoredValueError(unreadable_value(key, error)) from error


def unreadable_value(key: str, error: Exception) -> str:
    """Return what is wrong with a key's value, and how to go on."""
    return (
        f"the key {key!r} of the run's bucket cannot be read: {error}. If no newer build wrote it, it is damaged or "
        "somebody has the key of its service: `lachesis runs recover` puts the value aside"
    )
