"""Retention where clocks differ: an hour's difference from the server's neither ends a hold nor keeps a dead one."""

import time

import anyio
import pytest
from stages import run_governor

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.calls.open_groups import OpenGroups
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.governor.config import FlowConfig, RetentionConfig
from lachesis.pipeline.governor.logic import Governor
from lachesis.pipeline.retention.holds import holding, read_record, update_record
from lachesis.pipeline.retention.trimming import HistoryTrimmer
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.retention import Hold
from lachesis.schemas.subjects import ROLLOUTS
from lachesis.services.stage_settings import history_settings

RUN = "r"
HOUR_NS = 3_600 * 10**9


@pytest.mark.parametrize(("holder_ns", "governor_ns"), [(0, HOUR_NS), (-HOUR_NS, 0), (HOUR_NS, -HOUR_NS)])
async def test_a_live_hold_stays_and_a_dead_one_lapses(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch, holder_ns: int, governor_ns: int
) -> None:
    retention = RetentionConfig(trim_at=1e-5, trim_to=1e-6)  # a few KiB
    config = RunConfig(run=RUN, flow=FlowConfig(retention=retention))
    real_ns = time.time_ns
    for n in range(4):
        await nats_bus.publish(subjects.rollout(RUN, "words"), bytes(10_000), msg_id=f"{n}")
    dead = Hold(needs={ROLLOUTS: 1}, expires_ns=await nats_bus.server_time_ns() - 1, about="dead")
    await update_record(nats_bus, RUN, lambda old: old.replace(holds={"dead": dead}))

    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + holder_ns)
    async with holding(nats_bus, RUN, "live", {ROLLOUTS: 1}, about="a replay") as held:
        live = (await read_record(nats_bus, RUN)).holds[held.name]
        assert 0 < live.expires_ns - await nats_bus.server_time_ns() <= 60 * 10**9
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + governor_ns)
        async with open_service(nats_bus, "governor", RUN) as service, anyio.create_task_group() as tasks:
            tasks.start_soon(run_governor, service, config)
            with anyio.fail_after(60):
                while f"flow/trimmed_below/{ROLLOUTS}" not in service.vitals.metrics:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
        assert set((await read_record(nats_bus, RUN)).holds) == {held.name}


@pytest.mark.parametrize("governor_ns", [HOUR_NS, -HOUR_NS])
async def test_the_least_age_of_history_is_told_by_the_server(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch, governor_ns: int
) -> None:
    """What is younger than `min_age_s` stays, what is older goes."""
    subject, real_ns = subjects.rollout(RUN, "words"), time.time_ns
    seqs = [(await nats_bus.publish(subject, b"", msg_id=f"{n}")).seq for n in range(3)]
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + governor_ns)
    for min_age_s, expected in ((600.0, seqs[0]), (1e-9, seqs[-1] + 1)):
        config = RunConfig(run=RUN, flow=FlowConfig(retention=RetentionConfig(min_age_s=min_age_s)))
        budget = Governor(config.flow, config.batching, term="t").budget
        async with open_service(nats_bus, "governor", RUN) as service:
            history = HistoryTrimmer(service, history_settings(config), budget, OpenGroups(lambda env, lease: False))
            assert await history._old_enough(ROLLOUTS, [subject], seqs[-1] + 1) == expected
