"""Records durably how often handling one message ended the process that held it.

The broker's delivery count does not distinguish a death from a message that was given back in good order. So a replica
that takes a redelivered message notes a death before it starts, and removes the note when it is done, however that
ends.
"""

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.errors import DamagedError
from lachesis.schemas import keys

__all__ = ["DeliveryAttempts"]


class DeliveryAttempts:
    """Deaths by message of one durable consumer, in the run's bucket. Calls raise `InfrastructureError`."""

    def __init__(self, bus: Bus, durable: str) -> None:
        self._bus = bus
        self._durable = durable

    def _key(self, seq: int) -> str:
        return keys.attempts(self._durable, seq)

    async def deaths(self, seq: int) -> int:
        """Return how many handlings of the message at `seq` were noted and never came to an end."""
        try:
            entry = await self._bus.value(self._key(seq))
        except DamagedError:
            entry = None
        count = entry.value if entry else b""
        # what is no count was not written here, or is damaged; without it, a poisonous message kills a few times more
        return int(count) if count.isdigit() and len(count) <= 9 else 0

    async def record(self, seq: int, deaths: int) -> None:
        """Set the record; there is none of no deaths."""
        if deaths == 0:
            await self._bus.delete(self._key(seq))
            return
        await self._bus.put(self._key(seq), str(deaths).encode())
