"""Finds stored messages of a schema version that this build does not read, and their possible writers."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.newer_writers import writers_of
from lachesis.pipeline.common.doctor_finding import DoctorFinding, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter
from lachesis.schemas.codec import SCHEMA_VERSION, UNREADABLE, decode
from lachesis.schemas.errors import DataError, SchemaError
from lachesis.schemas.subjects import EVENTS, LEDGER, ROLLOUTS

__all__ = ["NewerMessage", "check_versions", "newer_messages"]

_LAST_MESSAGES = 4096
"""Sequences at the end of a stream that are looked at, and dead letters; earlier messages are known by these."""
_MAX_BYTES = 4 << 20
_MAX_SHOWN = 3


class NewerMessage(NamedTuple):
    stream: str
    subject: str
    seq: int
    version: int


class _Versioned(msgspec.Struct):
    v: int = 1


async def newer_messages(bus: Bus, config: RunConfig) -> list[NewerMessage]:
    """Return the messages of a newer version, by place.

    Looked at are the ends of EVENTS, LEDGER and the list of promotions, and what the newest dead letters name.
    """
    run, revision = config.run, config.revision
    found: dict[tuple[str, int], NewerMessage] = {}
    filters = {
        EVENTS: subjects.stream_subjects(run)[EVENTS],
        LEDGER: subjects.stream_subjects(run)[LEDGER],
        ROLLOUTS: [subjects.promotion(run, revision)],
    }
    dead = deque[tuple[str, int]](maxlen=_LAST_MESSAGES)
    async with bus.read(EVENTS, [subjects.event("dead", run, revision)], follow=False, max_bytes=_MAX_BYTES) as stored:
        async for message in stored:
            try:
                letter = decode(DeadLetter, message.data)
            except SchemaError:
                continue
            if "schema version" in letter.reason and letter.stream in subjects.STREAMS:
                dead.append((letter.stream, letter.seq))
    for stream, wanted in filters.items():
        start = max(1, (await bus.usage(stream)).last - _LAST_MESSAGES + 1)
        async with bus.read(stream, wanted, start=start, follow=False, max_bytes=_MAX_BYTES) as stored:
            async for message in stored:
                version = _version(message.data)
                if version > SCHEMA_VERSION:
                    found[stream, message.seq] = NewerMessage(stream, message.subject, message.seq, version)
    for stream, seq in sorted(set(dead) - found.keys()):
        with suppress(NotFoundError, DataError):  # trimmed, or a large message that cannot be put together
            message = await bus.get(stream, seq)
            if (version := _version(message.data)) > SCHEMA_VERSION:
                found[stream, seq] = NewerMessage(stream, message.subject, seq, version)
    return sorted(found.values())


async def check_versions(bus: Bus, config: RunConfig) -> AsyncIterator[DoctorFinding]:
    """Yield a warning that names the messages, who may have written them, and what to do."""
    try:
        found = await newer_messages(bus, config)
    except (InfrastructureError, NotFoundError):
        return  # said elsewhere: the streams are not there, or do not answer
    if not found:
        return
    named = [
        f"sequence {one.seq} of {one.stream} ({one.subject}), version {one.version}, which only "
        f"{' or '.join(writers_of(config.run, one.subject)) or 'an operator'} may write"
        for one in found[:_MAX_SHOWN]
    ]
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    yield warn(
        "versions",
        f"stored with a newer schema version than {SCHEMA_VERSION}, the newest this build reads: "
        f"{'; '.join(named)}{more}. Services skip such a message, unless a service that may write it says that it "
        "writes that version; then they stop",
        "if the run was upgraded, install the newer version here and for the services that stopped; if it was not, "
        "somebody uses that service's key: delete its seed, repeat `lachesis auth init` and reload the server",
    )


def _version(data: bytes) -> int:
    try:
        return msgspec.msgpack.decode(data, type=_Versioned).v
    except UNREADABLE:
        return 0
