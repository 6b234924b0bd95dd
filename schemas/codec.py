"""Encodes and decodes events: versioned msgpack maps whose invariants are checked when they are read.

Unknown fields are ignored.

Guarantees that `decode` raises nothing but `SchemaError`, whatever the bytes are, and that its cost is bounded by the
length of its input (a length prefix that promises more than the message holds is refused before anything is allocated).

How the wire may change: a new field that readers can do without is added with a default, and older readers pass over
it. Whatever they would misread (a field's meaning, unit or type, or what the others mean where it is set) raises
`SCHEMA_VERSION`, and the version of those events that carry it (`Event.needs`): older readers refuse these with
`VersionError`, and read all others. A message that passes through a process keeps the fields that this process does not
know: messages are stored once, and passed on only as the same bytes, never as the struct read from them.
"""

from typing import Any, Final, Self, TypeVar

import msgspec

from lachesis.schemas.errors import SchemaError, VersionError

__all__ = ["MAX_ERROR_CHARS", "SCHEMA_VERSION", "UNREADABLE", "Event", "decode", "encode"]

SCHEMA_VERSION = 4
"""Newest version that this build reads; a message with a higher one is refused, since its meaning may have changed.

2: what a promoted revision judges says so; groups may have no logprobs; offline trainers may have a teacher.
3: an environment may exclude samples of a group from training.
4: sequences of a group, and a teacher's logprobs of them, may travel without what they begin with alike.
"""
UNREADABLE: Final = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError)
"""What a msgspec decoder raises on hostile bytes."""
MAX_ERROR_CHARS: Final = 500
"""Characters kept of a decoder's complaint, which may quote the message."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every event. `v` is the wire version that a reader must know, or the writer spoke."""

    v: int = 1

    def __post_init__(self) -> None:
        if self.v < self.needs:
            msgspec.structs.force_setattr(self, "v", self.needs)

    @property
    def needs(self) -> int:
        """The lowest wire version whose readers do not misread the event."""
        return 1

    def check(self) -> None:
        """Raise `SchemaError` where a rule that types cannot express is broken. Called by `decode`."""

    def to_wire(self) -> Self:
        """Return the form that travels. Called by `encode`."""
        return self

    def from_wire(self, data: bytes | memoryview) -> Self:
        """Return the event as its users know it, of what came as `data`. Called by `decode`, before `check`."""
        return self

    def replace(self, **changes: Any) -> Self:
        return msgspec.structs.replace(self, **changes)


E = TypeVar("E", bound=Event)


class _Versioned(msgspec.Struct):
    v: int = 1


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def encode(event: Event) -> bytes:
    """Return the event as a msgpack map."""
    return _encoder.encode(event.to_wire())


def decode(kind: type[E], data: bytes | memoryview) -> E:
    """Return the `kind` that `data` holds.

    Raises `SchemaError` when the bytes are no msgpack, miss a required field, hold a wrong type or break an invariant
    of the event, and `VersionError`, which is one, when they speak a newer version.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        event: E = decoder.decode(data)
    except UNREADABLE as error:
        _refuse_newer(kind, _version_of(data))  # which may well be why it cannot be read
        raise SchemaError(f"{kind.__name__}: {str(error)[:MAX_ERROR_CHARS]} ({len(data)} bytes)") from error
    _refuse_newer(kind, event.v)
    event = event.from_wire(data)
    event.check()
    return event


def _version_of(data: bytes | memoryview) -> int:
    try:
        return _version_decoder.decode(data).v
    except UNREADABLE:
        return SCHEMA_VERSION


def _refuse_newer(kind: type[Event], version: int) -> None:
    if version > SCHEMA_VERSION:
        raise VersionError(
            f"{kind.__name__}: schema version {version} is newer than {SCHEMA_VERSION}, the newest this build reads; "
            "upgrade this service (in an upgrade, readers come before writers)",
            version,
        )
