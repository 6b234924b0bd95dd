"""What the batcher exports of traces: which it ends, which it keeps, what a batch links to."""

from contextlib import asynccontextmanager

import msgspec
import pytest
from stages import run_batcher
from unit.spans import Sink

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.telemetry.config import TelemetryConfig
from lachesis.pipeline.telemetry.sampling import is_sampled
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.schemas import subjects
from lachesis.schemas.annotations import Commit, GroupReward, RewardEvent, Stamp
from lachesis.schemas.codec import encode
from lachesis.schemas.control import StageIncident
from lachesis.schemas.ids import new_group_id

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x", samples=2)},
    batching=BatchingConfig(batch_size=4, max_staleness=2),
)
LATE = Stamp("teacher", 2_000, 6_000, 7_000, 2)


@asynccontextmanager
async def batching(lab, ratio, config=CONFIG):
    sink = Sink()
    async with lab.running(lambda service: run_batcher(service, config), "batcher") as service:
        service.tracing = Tracing(TelemetryConfig(ratio=ratio, slow_s=1e12), sink)
        yield service, sink


async def store(lab, n, verdict, *, group=None):
    """Store a rollout and its reward; return its group."""
    rollout = lab.group(n, **({} if group is None else {"id": group}))
    seq = await lab.store(rollout)
    trains = verdict == "trainable"
    reward = GroupReward(
        group=rollout.id, seq=seq, item=rollout.item, policy_step=0, verdict=verdict, scores=[1.0, 0.0],
        rewards=[1.0, 0.0], advantages=[1.0, -1.0] if trains else [None, None], snapshot="s", mean=0.5, std=0.5,
        range=1.0, n_valid=2, stamps=[Stamp("scorer", 1_000, 3_000, 4_000)],
    )  # fmt: skip
    event = RewardEvent(
        run="r", env="sums", revision="live", advantage="grpo",
        commit=Commit(term="t", index=n, cursors={}, delta=b"", crc32=0),
        groups=[reward],
    )  # fmt: skip
    await lab.bus.publish(subjects.event("reward", "r", "live", "sums"), encode(event), msg_id=f"w{n}")
    return rollout.id


def emitted(service, count):
    async def condition():
        return service.vitals.emitted >= count

    return condition


async def test_of_rollouts_that_were_dropped_those_that_nobody_chose_to_are_kept(lab):
    async with batching(lab, 0.0) as (service, sink):
        await store(lab, 1, "zero_variance")
        failed = await store(lab, 2, "unscorable")
        await lab.until(emitted(service, 2))
    assert sink.roots() == {failed: ("dropped", "failed")}


async def test_a_stage_that_comes_after_the_end_with_a_redelivery_keeps_the_trace(lab):
    async with batching(lab, 0.0) as (service, sink):
        group = await store(lab, 1, "zero_variance")
        await lab.until(emitted(service, 1))
        assert not sink.spans
        event = encode(StageIncident(run="r", group=group, stamp=LATE))

        async def announced():
            await lab.bus.broadcast(subjects.incident("r"), event)  # until the batcher listens; once is enough
            return bool(sink.spans)

        await lab.bus.broadcast(subjects.incident("r"), b"\xc1")
        await lab.until(announced)
    assert sink.roots() == {group: ("dropped", "redelivered")}
    works = [(span.service, span.attributes["rl.delivery.attempt"]) for span in sink.spans if "process" in span.name]
    assert works == [("scorer", 1), ("batcher", 1), ("teacher", 2)] or sorted(works) == [
        ("batcher", 1), ("scorer", 1), ("teacher", 2),
    ]  # fmt: skip


async def test_a_batch_names_its_groups_and_links_to_those_that_are_traced(lab):
    ratio = 0.5
    named = [next(name for name in iter(new_group_id, "") if is_sampled(name, ratio) is wanted)
             for wanted in (True, False)]  # fmt: skip
    async with batching(lab, ratio) as (service, sink):
        for n, group in enumerate(named, 1):
            await store(lab, n, "trainable", group=group)
        await lab.until(emitted(service, 2))
    (batch,) = [span for span in sink.spans if span.name == "assemble batch"]
    assert set(batch.attributes["rl.group.ids"]) == set(named)
    assert [link.trace for link in batch.links] == named[:1]
    assert sink.roots() == {}  # the trainer ends them


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_where_no_trainer_of_the_run_ends_traces_a_batch_does(lab, ratio):
    observed = msgspec.structs.replace(CONFIG, mode="observe")
    async with batching(lab, ratio, observed) as (service, sink):
        groups = [await store(lab, n, "trainable") for n in (1, 2)]
        await lab.until(emitted(service, 2))
    assert sink.roots() == (dict.fromkeys(groups, ("batched", "ratio")) if ratio else {})
