"""The durable record of deaths: how often handling one message ended the process that held it.

The broker's delivery count cannot tell a death from a message given back in good order, so a replica that takes a
redelivered message notes it before it starts and clears the note when it is done, however that ends.
"""

from lachesis.pipeline.bus.api import Bus
from lachesis.schemas import subjects

__all__ = ["Attempts"]


class Attempts:
    """Deaths by message of one durable consumer, in the attempts bucket."""

    def __init__(self, bus: Bus, durable: str) -> None:
        self._bus = bus
        self._durable = durable

    def _key(self, seq: int) -> str:
        return f"{self._durable}.{seq}"

    async def begin(self, seq: int) -> int:
        """Note that handling begins and return how many earlier beginnings never came to an end."""
        entry = await self._bus.value(subjects.BUCKETS["attempts"], self._key(seq))
        deaths = int(entry.value) if entry else 0
        await self._bus.put(subjects.BUCKETS["attempts"], self._key(seq), str(deaths + 1).encode())
        return deaths

    async def survived(self, seq: int) -> None:
        """Note that the handling that `begin` announced came to an end in good order."""
        await self._bus.put(subjects.BUCKETS["attempts"], self._key(seq), b"0")
