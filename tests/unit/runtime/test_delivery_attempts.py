"""The record of deaths where its store is damaged: a poisonous message kills a few times more, and nothing stops."""

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.runtime.delivery_attempts import DeliveryAttempts
from lachesis.schemas import keys


async def test_a_damaged_record_counts_as_none_and_is_written_anew():
    async with MemoryBus() as bus:
        attempts = DeliveryAttempts(bus, "scorer=r=live")
        await attempts.record(7, 2)
        assert await attempts.deaths(7) == 2
        bus.damage_value(keys.attempts("scorer=r=live", "7"))
        assert await attempts.deaths(7) == 0
        await attempts.record(7, 1)
        assert await attempts.deaths(7) == 1
