from contextlib import aclosing

import anyio
import anyio.lowlevel
import pytest

from lachesis.pipeline.bus.api import StoredMessage
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats, read_heartbeat
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError

BEAT = Heartbeat(
    host="h",
    schema_version=1,
    run="r",
    service="health",
    instance="1-a",
    pid=1,
    time_ns=1,
    stage=ServiceMetrics().report(),
)


def test_a_heartbeat_counts_on_the_subject_of_its_service_alone() -> None:
    own = StoredMessage("", subjects.heartbeat("r", "health", "1-a"), 0, encode(BEAT), 1)
    assert read_heartbeat(own) == BEAT
    for subject in ("rl.heartbeat.r.environment.1-a", "rl.heartbeat.other.health.1-a", "rl.heartbeat.r.health", "x"):
        with pytest.raises(SchemaError):
            read_heartbeat(StoredMessage("", subject, 0, encode(BEAT), 1))


async def test_the_heartbeats_of_one_service_can_be_listened_to_alone() -> None:
    bus = MemoryBus()
    async with aclosing(listen_to_heartbeats(bus, "r", "health")) as beats, background() as tasks:
        first: list[Heartbeat] = []

        async def listen() -> None:
            first.append(await anext(beats))

        tasks.start_soon(listen)
        with anyio.fail_after(30):
            while not first:
                for service in ("batcher", "health"):
                    beat = BEAT.replace(service=service)
                    await bus.broadcast(subjects.heartbeat("r", service, "1-a"), encode(beat))
                await anyio.lowlevel.checkpoint()
    assert [beat.service for beat in first] == ["health"]
