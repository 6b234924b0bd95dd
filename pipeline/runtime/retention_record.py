"""Reads the record of what was trimmed of a run's history and of what is held back from that."""

from lachesis.pipeline.bus.api import Bus
from lachesis.schemas import keys
from lachesis.schemas.codec import decode
from lachesis.schemas.retention import Retention

__all__ = ["read_record"]


async def read_record(bus: Bus, run: str) -> Retention:
    """Return the run's record; an empty one where nothing was trimmed or held yet. Raises `SchemaError`."""
    entry = await bus.value(keys.RETENTION)
    return decode(Retention, entry.value) if entry else Retention(run=run)
