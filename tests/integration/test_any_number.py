"""An environment's rewards of any magnitude, through the stages of a real run on a real server: all of them go on."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import pytest
from fuzz.examples import group
from stages import run_batcher, run_curriculum, run_governor, run_normalizer, run_scorer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.health.stage import run_health
from lachesis.pipeline.runtime.service import open_service
from lachesis.schemas import subjects
from lachesis.schemas.alerts import AlertEvent
from lachesis.schemas.annotations import CurriculumEvent, GroupScore, ScoreEvent
from lachesis.schemas.codec import Event, decode, encode
from lachesis.schemas.ids import new_group_id
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.planning_header import PLAN_HEADER, Plan
from lachesis.schemas.rollout import Dispatch
from lachesis.services.stage_settings import health_settings

E = TypeVar("E", bound=Event)
RUN = "r"
SUMS = Path(__file__).parents[1] / "examples" / "sums.py"
CONFIG = RunConfig(
    run=RUN,
    environments={"sums": EnvironmentConfig(kind=f"{SUMS}:Sums", samples=2)},
    batching=BatchingConfig(batch_size=4, max_staleness=1000),
    health=HealthConfig(window=16, act="warn"),
)
STAGES = {
    "governor": run_governor,
    "scorer": run_scorer,
    "normalizer": run_normalizer,
    "batcher": run_batcher,
    "health": lambda service, config: run_health(service, health_settings(config)),
    "curriculum": run_curriculum,
}


@asynccontextmanager
async def all_stages(bus: NatsBus) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:

        async def run(name: str) -> None:
            async with open_service(bus, name, RUN) as service:
                await STAGES[name](service, CONFIG)

        for name in STAGES:
            tasks.start_soon(run, name)
        yield
        tasks.cancel_scope.cancel()


async def stored(bus: NatsBus, model: type[E], subject: str, stream: str = subjects.EVENTS) -> list[E]:
    async with bus.read(stream, [subject], follow=False) as messages:
        return [decode(model, message.data) async for message in messages]


async def store(bus: NatsBus, counter: int, rewards: list[float]) -> int:
    """Store a rollout whose environment gave these rewards."""
    plain = group().sequences
    made = group(
        id=new_group_id(), counter=counter, policy_versions=["0-first-ab"],
        sequences=msgspec.structs.replace(plain, rewards={"environment": rewards}),
        dispatch=Dispatch(index=counter, snapshot_id="s", probability=0.5),
    )  # fmt: skip
    ack = await bus.publish(
        subjects.rollout(RUN, "sums"), encode(made), msg_id=made.id, headers={PLAN_HEADER: Plan.of(made).pack()}
    )
    return ack.seq


async def store_score_beyond_all_bounds(bus: NatsBus, n: int, value: float) -> None:
    """No scorer gives one, but the wire lets every finite number through."""
    score = GroupScore(
        group=f"{n + 1:032x}", seq=1_000_000 + n, item="7", policy_step=0, scores=[value, -value],
        ratings={name: [value, -value] for name in ("a", "b", "c")}, lengths=[3, 3], success=value,
    )  # fmt: skip
    event = ScoreEvent(run=RUN, env="sums", revision="live", ensemble="e", raters={}, groups=[score])
    await bus.publish(subjects.event("score", RUN, "live", "sums"), encode(event), msg_id=f"old{n}")


@pytest.mark.slow
async def test_every_stage_outlives_every_finite_reward(nats_bus: NatsBus) -> None:
    rng = random.Random(0)
    extreme = [1e155, -1e155, 1e308, -1.7e308, 1e12, 1e13, 1e-320, 1e-160, 5e298]
    ledger, alerts = subjects.ledger(RUN, "main"), subjects.event("alert", RUN, "live", "sums")
    learned, given = subjects.event("curriculum", RUN, "live", "sums"), {}
    async with all_stages(nats_bus):
        for counter in range(192):
            value = rng.choice(extreme) if rng.random() < 0.5 else 10 ** rng.uniform(-320, 308)
            rewards = [0.25, 0.75] if counter % 2 else rng.choice([[value, -value], [value, value], [value, 0.5]])
            given[await store(nats_bus, counter, rewards)] = rewards
            if counter % 8 == 0:
                await store_score_beyond_all_bounds(nats_bus, counter, value)
        with anyio.fail_after(120):
            while True:
                ended: dict[int, str] = {}
                for entry in await stored(nats_bus, LedgerEntry, ledger, subjects.LEDGER):
                    ended |= {outcome.seq: outcome.kind for outcome in entry.outcomes}
                    ended |= {ref.seq: "batched" for ref in (entry.batch.groups if entry.batch else [])}
                judged = sum(event.source == "groups" for event in await stored(nats_bus, AlertEvent, alerts))
                waiting = len(given.keys() - ended.keys())
                if waiting < CONFIG.batching.batch_size and judged >= 12:
                    break
                await anyio.sleep(0.1)
            while not await stored(nats_bus, CurriculumEvent, learned):  # noqa: ASYNC110 - it is another service's
                await anyio.sleep(0.1)
    plain = {ended[seq] for seq, rewards in given.items() if rewards == [0.25, 0.75] and seq in ended}
    assert "batched" in plain
    assert plain <= {"batched", "zero_variance"}, "no group pays for the reward of another"
    beyond = {ended[seq] for seq, rewards in given.items() if max(map(abs, rewards)) > 1e13 and seq in ended}
    assert beyond <= {"dead", "unscorable"}
