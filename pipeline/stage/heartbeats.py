"""Reads heartbeats: only those on the subject of the service that they are of, which is all that its key may write."""

from lachesis.pipeline.bus.api import Stored
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

__all__ = ["read_heartbeat"]


def read_heartbeat(message: Stored) -> Heartbeat:
    """Return the heartbeat in `message`.

    Raises `SchemaError` where there is none, or one in the name of another service, run or instance.
    """
    beat = decode(Heartbeat, message.data)
    if message.subject != subjects.heartbeat(beat.run, beat.service, beat.instance):
        raise SchemaError(f"{message.subject}: a heartbeat of {beat.service} {beat.instance} of run {beat.run}")
    return beat
