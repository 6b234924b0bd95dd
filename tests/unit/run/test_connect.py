"""Who speaks for a run, and when one on a server of somebody else's has ended: its last step is on record, and none
speaks any more."""

from typing import Any

import anyio
import pytest

from lachesis.pipeline.bus.config import ConnectionConfig
from lachesis.pipeline.bus.memory.memory_bus import MemoryBus
from lachesis.pipeline.config.run import RunConfig, TrainingConfig
from lachesis.pipeline.runtime.service_metrics import ServiceMetrics
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.ledger import TrainReport
from lachesis.services.run import connect
from lachesis.services.run.connect import has_ended, recent_heartbeats

REPORTS = subjects.state("r", "trainer", subjects.LIVE, "main")


def config(steps: int | None = 3) -> RunConfig:
    return RunConfig(run="r", nats=ConnectionConfig(), training=TrainingConfig(steps=steps))


def report(step: int) -> bytes:
    return encode(
        TrainReport(
            run="r", trainer="main", lineage="a", term="t", step=step, ledger_index=0, chain="0" * 64, next_batch=step,
            policy_version=f"{step}-a-b", checkpoint="c",
        )
    )  # fmt: skip


def beat(service: str) -> bytes:
    stage = ServiceMetrics().report()
    return encode(
        Heartbeat(
            host="h",
            schema_version=1,
            run="r",
            service=service,
            instance=f"{service}-1-a",
            pid=1,
            time_ns=0,
            stage=stage,
        )
    )


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "SILENCE_S", 0.2)


@pytest.mark.parametrize(("stored", "steps", "ended"), [
    (None, 3, False), (report(2), 3, False), (report(3), 3, True), (report(4), 3, True), (report(3), None, False),
    (b"no report", 3, False),
])  # fmt: skip
async def test_a_silent_run_has_ended_once_its_last_step_is_reported(
    stored: bytes | None, steps: int | None, ended: bool
) -> None:
    async with MemoryBus() as bus:
        if stored is not None:
            await bus.publish(REPORTS, stored, msg_id="1")
        assert await has_ended(bus, config(steps)) is ended


async def test_a_run_whose_services_speak_goes_on_whatever_is_on_record() -> None:
    async with MemoryBus() as bus, anyio.create_task_group() as tasks:

        async def speak(*, task_status: Any) -> None:
            task_status.started()
            while True:
                await bus.broadcast(subjects.heartbeat("r", "evaluator", "1-a"), beat("evaluator"))
                await anyio.sleep(0.01)

        await bus.publish(REPORTS, report(3), msg_id="1")
        await tasks.start(speak)
        assert not await has_ended(bus, config())
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("awaited", "heard"), [
    ([], {"scorer"}), (["scorer"], {"scorer"}), (["scorer", "trainer"], {"scorer", "trainer"}),
])  # fmt: skip
async def test_services_that_are_awaited_are_listened_for_longer(
    awaited: list[str], heard: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "_HEARTBEATS_S", 0.2)
    monkeypatch.setattr(connect, "SILENCE_S", 60.0)
    async with MemoryBus() as bus, anyio.create_task_group() as tasks:

        async def speak() -> None:
            await anyio.sleep(0.01)
            await bus.broadcast(subjects.heartbeat("r", "scorer", "1-a"), beat("scorer"))
            await anyio.sleep(0.5)
            await bus.broadcast(subjects.heartbeat("r", "trainer", "1-a"), beat("trainer"))

        tasks.start_soon(speak)
        with anyio.fail_after(30):
            assert {one.service for one in await recent_heartbeats(bus, "r", awaited)} == heard
        tasks.cancel_scope.cancel()
