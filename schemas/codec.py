"""Events to bytes and back: msgpack maps, versioned, unknown fields ignored, invariants checked at the edge.

Guarantees that `decode` raises nothing but `SchemaError`, whatever the bytes are, and that its cost is bounded by the
length of its input (a length prefix that promises more than the message holds is refused before anything is allocated).
"""

from typing import Any, Self, TypeVar

import msgspec

from lachesis.schemas.errors import SchemaError

__all__ = ["SCHEMA_VERSION", "Event", "decode", "encode"]

SCHEMA_VERSION = 1
"""Version of the whole wire; a message with a higher one is refused, since its meaning may have changed."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every event. `v` is the wire version the writer spoke."""

    v: int = SCHEMA_VERSION

    def check(self) -> None:
        """Raise `SchemaError` where a rule that types cannot express is broken. Called by `decode`."""

    def replace(self, **changes: Any) -> Self:
        return msgspec.structs.replace(self, **changes)


E = TypeVar("E", bound=Event)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


def encode(event: Event) -> bytes:
    """Return the event as a msgpack map."""
    return _encoder.encode(event)


def decode(kind: type[E], data: bytes | memoryview) -> E:
    """Return the `kind` that `data` holds.

    Raises `SchemaError` when the bytes are no msgpack, miss a required field, hold a wrong type, speak a newer version
    or break an invariant of the event.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        event: E = decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise SchemaError(f"{kind.__name__}: {error} ({len(data)} bytes)") from error
    if event.v > SCHEMA_VERSION:
        raise SchemaError(
            f"{kind.__name__}: schema version {event.v} is newer than {SCHEMA_VERSION}, the newest this build reads; "
            "upgrade this service"
        )
    event.check()
    return event
