"""For your own unit tests: a bus that lives in the process and behaves as the real one does.

from lachesis.testing import MemoryBus

async def test_my_stage():
    async with MemoryBus() as bus:
        ...
        bus.advance(30)  # seconds: what was lent and not acknowledged is delivered again
"""

from lachesis.pipeline.bus.memory import MemoryBus

__all__ = ["MemoryBus"]
