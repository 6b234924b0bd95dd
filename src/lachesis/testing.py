"""For your own unit tests: a bus that lives in the process and behaves as the real one does, and fake inference.

from lachesis.testing import MemoryBus

async def test_my_stage():
    async with MemoryBus() as bus:
        ...
        bus.advance(30)  # seconds: what was lent and not acknowledged is delivered again

async def test_my_environment():
    inference = FakeInference(lambda prompt, call: "the model's answer")
    assert (await evaluate(MyEnvironment(), inference, items=[0])).avg_at_k == 1.0
"""

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.environment.fake_inference import FakeInference
from lachesis.pipeline.evaluator.evaluate import evaluate

__all__ = ["FakeInference", "MemoryBus", "evaluate"]
