"""Which services look for another of their kind before they start."""

import pytest

from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.process.single_writer import refuse_writers_beside


@pytest.mark.parametrize("name", ["environment-words", "inference-policy", "teacher-large", "scorer", "batcher"])
async def test_a_process_that_is_started_by_hand_is_alone(name):
    await refuse_writers_beside(MemoryBus(), RunConfig(run="r"), [name])
