"""What stands still says so: without a quorum within seconds, with the reason, and no longer than it lasts."""

import logging
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from integration.cluster.nodes import Cluster, make_streams

from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import Heartbeat


@pytest.mark.slow
async def test_without_a_quorum_services_say_so_until_it_is_back(
    tmp_path: Path, streams_config: StreamsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lachesis")
    with Cluster(tmp_path / "three nodes") as cluster:
        async with await cluster.connect("one", "run") as bus:
            await make_streams(bus, streams_config)
            await bus.publish(subjects.rollout("run", "math"), b"first", msg_id="first")
            survivor, *killed = sorted(cluster.names, key=lambda name: str(cluster.ports[name]) not in str(bus.server))
            for name in killed:
                await cluster.end(name)
            async with (
                open_service(bus, "scorer", "run") as service,
                bus.listen(subjects.heartbeat("run")) as heard,
                anyio.create_task_group() as tasks,
            ):
                service.mark_ok()
                tasks.start_soon(publish, bus)
                beat = await next_beat(heard, lambda note: "no leader" in note)
                assert beat.stage.state == "waiting"
                assert "publish rl.rollout.run.math" in (beat.stage.note or "")
                assert "(2 of 3 servers away: 127.0.0.1:" in (beat.stage.note or "")
                assert bus.server is not None
                assert bus.server[1] == cluster.ports[survivor]
                for name in killed:
                    cluster.start(name)
                beat = await next_beat(heard, lambda note: not note)
                assert beat.stage.state == "ok"
                assert bus.stall is None
    told = [record.message for record in caplog.records]
    assert any(text.startswith("stalled for") and "no leader" in text for text in told)
    assert any(text.startswith("goes on after") for text in told)


async def publish(bus: NatsBus) -> None:
    await bus.publish(subjects.rollout("run", "math"), b"second", msg_id="second")


async def next_beat(heard, fits: Callable[[str], bool]) -> Heartbeat:
    with anyio.fail_after(120):
        while True:
            beat = decode(Heartbeat, (await anext(heard)).data)
            if fits(beat.stage.note or ""):
                return beat
