"""Reads the newest event on a subject that one writer owns, whatever others have published there.

Only the owner should be able to publish there. If another did, its message can never be removed, and must not keep the
owner from starting. A message that is no event of the owner's is skipped with a warning. A message that a recovery
noted as unusable (`skipped_messages`) is skipped silently.
"""

import logging
from collections.abc import Callable
from typing import Literal, TypeVar

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.pipeline.bus.newer_writers import confirm_newer
from lachesis.pipeline.bus.routing import MSG_ID_HEADER
from lachesis.pipeline.bus.skipped_messages import SkippedMessages, read_skipped
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.errors import SchemaError, VersionError

__all__ = ["Newer", "decode_owned", "read_last_event"]

log = logging.getLogger("lachesis")

E = TypeVar("E", bound=Event)

Newer = Literal["confirm", "refuse", "skip"]
"""What is done about a message of a newer version than this build reads.

confirm: `VersionError` if the subject's writer says in its heartbeat that it writes that version, else it is foreign;
refuse: `VersionError`, since the reader itself is the subject's writer, which would write over what its upgraded self
has left there (every writer of ours stores a message id, so what has none is foreign); skip: it is passed over.
"""

_FIRST_LOOKBACK_MESSAGES = 64
"""Sequences before the last message that are read first for the owner's newest event; then eightfold."""


async def decode_owned(
    bus: Bus,
    kind: type[E],
    message: StoredMessage,
    is_ours: Callable[[E], bool],
    *,
    newer: Newer = "confirm",
    left_out: SkippedMessages,
) -> E | None:
    """Return the event that `message` holds, None (and a warning) if it is not the owner's.

    `left_out`: what is passed over without a warning, by `read_skipped`. Raises `VersionError` where a newer build of
    the owner wrote it; see `Newer`.
    """
    if message.seq in left_out.get(message.stream, ()):
        return None
    event, reason = await _read(bus, kind, message, is_ours, newer)
    if event is None:
        _warn(message, f"the message at sequence {message.seq} of {message.stream} was", reason)
    return event


async def read_last_event(
    bus: Bus,
    stream: str,
    subject: str,
    kind: type[E],
    is_ours: Callable[[E], bool],
    *,
    newer: Newer = "confirm",
) -> tuple[E | None, int, int]:
    """Return the owner's newest event, its sequence, and the sequence of the last message.

    None and 0 if there is no such event. Raises `VersionError` as `decode_owned`.

    The last one is what the owner's next message must expect. Where it is foreign the subject is read backwards, in
    steps that grow; one warning says how many messages were passed over.
    """
    last = await bus.last(stream, subject)
    if last is None:
        return None, 0, 0
    left_out = (await read_skipped(bus)).get(stream, ())
    found, reason = await _read(bus, kind, last, is_ours, newer) if last.seq not in left_out else (None, "")
    if found is not None:
        return found, last.seq, last.seq
    seq, foreign, reach = 0, 0, _FIRST_LOOKBACK_MESSAGES
    while found is None:
        start, foreign = max(1, last.seq - reach + 1), 0
        async with bus.read(stream, [subject], start=start, follow=False) as messages:
            async for message in messages:
                if message.seq in left_out:
                    continue
                earlier, why = await _read(bus, kind, message, is_ours, newer)
                if earlier is not None:
                    found, seq, foreign = earlier, message.seq, 0
                else:
                    foreign, reason = foreign + 1, why
        if start == 1:
            break
        reach *= 8
    if foreign:
        messages_were = "message was" if foreign == 1 else "messages were"
        _warn(last, f"{foreign} {messages_were}, up to sequence {last.seq} of {last.stream},", reason)
    return found, seq, last.seq


async def _read(
    bus: Bus, kind: type[E], message: StoredMessage, is_ours: Callable[[E], bool], newer: Newer
) -> tuple[E | None, str]:
    """Return the owner's event, or why the message holds none. Raises `VersionError`."""
    try:
        event = decode(kind, message.data)
    except SchemaError as error:
        if isinstance(error, VersionError):
            if newer == "confirm":
                await confirm_newer(bus, message, error)
            elif newer == "refuse" and MSG_ID_HEADER in message.headers:
                raise VersionError(
                    f"sequence {message.seq} of {message.stream} ({message.subject}): {error}. If no newer build ever "
                    "ran here, somebody has this service's key: `lachesis runs recover` passes over the message",
                    error.version,
                ) from error
        return None, str(error)
    if is_ours(event):
        return event, ""
    return None, f"a {kind.__name__} that does not follow what is there"


def _warn(message: StoredMessage, what: str, reason: str) -> None:
    log.warning(
        "%s: %s not written by its only writer and skipped (%s); another client may publish there, which "
        "the server's permissions should forbid",
        message.subject,
        what,
        reason,
    )
