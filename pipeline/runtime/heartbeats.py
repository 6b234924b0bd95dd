"""Reads heartbeats, and drops those that are not on their own service's subject.

A service's key may write to its own subject only.
"""

from collections.abc import AsyncGenerator

from lachesis.pipeline.bus.api import Bus, StoredMessage
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

__all__ = ["listen_to_heartbeats", "read_heartbeat"]


def read_heartbeat(message: StoredMessage) -> Heartbeat:
    """Return the heartbeat in `message`.

    Raises `SchemaError` where there is none, or one in the name of another service or run.
    """
    beat = decode(Heartbeat, message.data)
    own, _, _ = subjects.heartbeat(beat.run, beat.service).rpartition(".")
    if message.subject.rpartition(".")[0] != own:
        raise SchemaError(f"{message.subject}: a heartbeat of {beat.service} of run {beat.run}")
    return beat


async def listen_to_heartbeats(bus: Bus, run: str, service: str = "*") -> AsyncGenerator[Heartbeat]:
    """Yield the heartbeats of a run's services, or of one of them, until cancelled.

    Skips what is none: the next comes in a second.
    """
    async with bus.listen(subjects.heartbeat(run, service)) as messages:
        async for message in messages:
            try:
                yield read_heartbeat(message)
            except SchemaError:
                continue
