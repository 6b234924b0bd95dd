"""Reads heartbeats: only those on the subject of the service that they are of, which is all that its key may write."""

from lachesis.pipeline.bus.api import Stored
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

__all__ = ["read_heartbeat"]


def read_heartbeat(message: Stored) -> Heartbeat:
    """Return the heartbeat in `message`.

    Raises `SchemaError` where there is none, or one in the name of another service or run.
    """
    beat = decode(Heartbeat, message.data)
    own, _, _ = subjects.heartbeat(beat.run, beat.service).rpartition(".")
    if message.subject.rpartition(".")[0] != own:
        raise SchemaError(f"{message.subject}: a heartbeat of {beat.service} of run {beat.run}")
    return beat
