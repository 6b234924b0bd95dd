"""The newest event on a subject that one writer owns, whoever else has published there.

Nobody but the owner should be able to; but if somebody did, the owner must not be kept from starting by a message that
can never be taken away again. What is no event of the owner's is passed over, said so, and lies there for ever.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from lachesis.pipeline.bus.api import Bus, Stored
from lachesis.schemas.codec import Event, decode
from lachesis.schemas.errors import SchemaError, VersionError

__all__ = ["newest", "owned"]

log = logging.getLogger("lachesis")

E = TypeVar("E", bound=Event)


def owned(kind: type[E], message: Stored, is_ours: Callable[[E], bool]) -> E | None:
    """Return the event that `message` holds, None (and a warning) if it is not the owner's.

    Raises `VersionError`: what a newer build wrote is not foreign.
    """
    try:
        event = decode(kind, message.data)
    except VersionError:
        raise
    except SchemaError as error:
        reason = str(error)
    else:
        if is_ours(event):
            return event
        reason = f"a {kind.__name__} that does not follow what is there"
    log.warning(
        "%s: the message at sequence %d of %s was not written by its only writer and is passed over (%s); somebody "
        "else may publish there, which the server's permissions should forbid",
        message.subject,
        message.seq,
        message.stream,
        reason,
    )
    return None


async def newest(
    bus: Bus, stream: str, subject: str, kind: type[E], is_ours: Callable[[E], bool]
) -> tuple[E | None, int, int]:
    """Return the owner's newest event and its sequence (None and 0 where there is none), and that of the last message.

    The last one is what the owner's next message must expect. The subject is read whole where its last message is
    foreign.
    """
    stored = await bus.last(stream, subject)
    if stored is None:
        return None, 0, 0
    event = owned(kind, stored, is_ours)
    if event is not None:
        return event, stored.seq, stored.seq
    found, seq = None, 0
    async with bus.read(stream, [subject], follow=False) as messages:
        async for message in messages:
            earlier = owned(kind, message, is_ours)
            if earlier is not None:
                found, seq = earlier, message.seq
    return found, seq, stored.seq
