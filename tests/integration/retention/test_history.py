"""History on a real server: a run goes on for many times its budget, stops while it is still read, and goes on again.

Governor, batcher, normalizer, curriculum and scorer are the real ones; producer and trainer do what theirs do, without
inference and optimizer.
"""

import logging
import re
import time
from collections.abc import Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from integration.audit import audit
from stages import run_batcher, run_curriculum, run_governor, run_normalizer, run_scorer

from lachesis.pipeline.batcher.config import BatchingConfig
from lachesis.pipeline.bus import trimming
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.environment.leases import ProducerLeases
from lachesis.pipeline.errors import NotFoundError
from lachesis.pipeline.governor.config import FlowConfig
from lachesis.pipeline.health.config import HealthConfig
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import fetch_batch, follow_ledger
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.retention.holds import holding, read_record, update_record
from lachesis.pipeline.runtime.service import open_service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.subjects import LEDGER, ROLLOUTS

pytestmark = pytest.mark.slow

RUN = "r"
MIB = 1 << 20
BUDGET = 2 * MIB
STREAMS = StreamsConfig(
    rollouts_bytes=BUDGET,
    events_bytes=4 * MIB,
    replay_bytes=MIB,
    teacher_bytes=MIB,
    ledger_bytes=32 * MIB,
    bucket_bytes=MIB,
)
SUMS = f"{Path(__file__).parents[2] / 'examples' / 'sums.py'}:Sums"
GROUP_BYTES = 24_000
TOKENS = 1000


def a_config(**batching) -> RunConfig:
    return RunConfig(
        run=RUN,
        environments={"sums": EnvironmentConfig(kind=SUMS, params={"largest": 2}, samples=2)},
        batching=BatchingConfig(**{"batch_size": 8, "max_staleness": 1} | batching),
        normalization=NormalizationConfig(window=8),
        flow=FlowConfig(lease_s=2.0, retry_s=0.02),
        health=HealthConfig(enabled=False),
    )


class World:
    """A run in this process: each part can be killed and started again."""

    def __init__(self, bus, lab, config: RunConfig) -> None:
        self.bus = bus
        self.lab = lab
        self.config = config
        self.tasks: anyio.abc.TaskGroup
        self.services: dict[str, object] = {}
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.published = 0
        self.batches = 0
        self.reports_every = 2
        self.most_bytes = 0

    async def _main(self, name: str, main, scope: anyio.CancelScope) -> None:
        with scope:
            async with open_service(self.bus, name, RUN) as service:
                self.services[name] = service
                await main(service, self.config)

    def start(self, *names: str) -> None:
        mains = {
            "governor": run_governor,
            "batcher": run_batcher,
            "normalizer": run_normalizer,
            "curriculum": run_curriculum,
            "scorer": run_scorer,
            "producer": self._produce,
            "trainer": self._train,
        }
        for name in names or mains:
            self.scopes[name] = anyio.CancelScope()
            self.tasks.start_soon(self._main, name, mains[name], self.scopes[name])

    def kill(self, *names: str) -> None:
        for name in names or list(self.scopes):
            self.scopes.pop(name).cancel()

    async def _produce(self, service, _config) -> None:
        leases = ProducerLeases(service, "p", "sums")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(leases.renew)
            while (lease := await leases.acquire(2, GROUP_BYTES)) is not None:
                group = self.lab.group(self.published, tokens=TOKENS, lease=lease, policy_versions=[self.version])
                self.published += 1
                await self.lab.store(group)
                leases.settled(lease)

    @property
    def version(self) -> str:
        return f"{self.batches}-a-b"

    async def _train(self, service, config) -> None:
        feed = await BatchFeed.open(self.bus, RUN, "main", term=service.instance)
        reported = self.batches = feed.report.step if feed.report else 0

        async def report() -> None:
            nonlocal reported
            if self.reports_every and self.batches > reported:
                reported = self.batches
                await feed.report_trained(
                    policy_version=self.version, step=self.batches, lineage="a", checkpoint="c", voids=[]
                )

        async def report_when_idle() -> None:
            while True:
                before = self.batches
                await anyio.sleep(1.0)
                if before == self.batches:
                    await report()

        async with anyio.create_task_group() as tasks, aclosing(feed.batches()) as batches:
            tasks.start_soon(report_when_idle)
            async for batch in batches:
                assert not batch.unfetched, batch.unfetched
                assert batch.batch.number == self.batches
                feed.mark_trained(batch)
                self.batches += 1
                policy = PolicyRecord(run=RUN, version=self.version, weights="w", tokenizer_hash="tok", written_ns=1)
                await feed.publish_policy(policy)
                if self.batches - reported >= (self.reports_every or 1):
                    await report()

    async def until(self, condition: Callable[[], bool], seconds: float = 120) -> None:
        with anyio.fail_after(seconds):
            while not condition():
                self.most_bytes = max(self.most_bytes, (await self.bus.usage(ROLLOUTS)).bytes)
                await anyio.sleep(0.02)

    async def goes_on(self, groups: int = 30) -> None:
        """Wait for so many more groups and some more batches."""
        published, batches = self.published, self.batches
        await self.until(lambda: self.published >= published + groups and self.batches >= batches + 2)

    async def comes_to_rest(self) -> None:
        """Wait until nothing is published any more: what was promised may still come."""
        published = -1
        with anyio.fail_after(60):
            while published != self.published:
                published = self.published
                await anyio.sleep(1.5)

    def stopped_by(self) -> str:
        """What the governor says it waits for, if it does."""
        governor = self.services.get("governor")
        return governor.vitals.status_text or "" if governor and governor.vitals.state == "backpressure" else ""


@pytest.fixture
async def start(fresh_server, make_lab):
    @asynccontextmanager
    async def begin(config: RunConfig | None = None, streams: StreamsConfig = STREAMS):
        async with await connect(fresh_server.url, run=RUN, name="history", token=fresh_server.token) as bus:
            await bus.ensure_streams(streams)
            world = World(bus, make_lab(bus), config or a_config())
            async with anyio.create_task_group() as world.tasks:
                yield world
                world.tasks.cancel_scope.cancel()

    return begin


async def trains_from_its_checkpoint(world: World) -> None:
    """Fetch every batch behind the last report: raises where a payload is gone."""
    stored = await world.bus.last(LEDGER, subjects.state(RUN, "trainer", "live", "main"))
    report = decode(TrainReport, stored.data)
    position = LedgerPosition(report.ledger_index + 1, report.chain)
    async for entry in follow_ledger(world.bus, RUN, "main", position, follow=False):
        if entry.batch is not None:
            await fetch_batch(world.bus, entry.batch)


async def test_a_run_goes_on_for_many_times_its_budget(start) -> None:
    async with start() as world:
        world.start()
        for _ in range(3):
            times = (world.published * 2 * TOKENS * 8) // BUDGET + 1
            await world.until(lambda more=times: world.published * 2 * TOKENS * 8 > more * BUDGET)
            world.kill()  # every one of them, at any line
            await anyio.lowlevel.checkpoint()
            await trains_from_its_checkpoint(world)
            world.start()
        await world.goes_on()
        governor = world.services["governor"].vitals
        await world.until(lambda: governor.metrics.get("flow/trimmed_below/ROLLOUTS", 1) > 1)
        world.kill("producer")
    assert world.most_bytes < 0.85 * BUDGET
    assert world.published * 2 * TOKENS * 8 > 3 * BUDGET


@pytest.mark.parametrize("stalled", ["normalizer", "trainer", "scorer"])
async def test_a_stalled_reader_holds_what_it_needs_until_it_returns(start, caplog, stalled: str) -> None:
    caplog.set_level(logging.INFO)
    async with start(a_config(score_deadline_s=1.0)) as world:
        world.start()
        await world.goes_on()
        if stalled == "trainer":
            world.reports_every = 0  # it trains, and never makes a checkpoint
        else:
            world.kill(stalled)
        await world.until(lambda: stalled in world.stopped_by())  # at first it may wait for one that is merely slow
        note = world.stopped_by()
        assert "no group is admitted: stream ROLLOUTS is full" in note
        assert "raise streams.rollouts_bytes" in note
        assert "no group is admitted: stream ROLLOUTS is full" in caplog.text
        await world.comes_to_rest()
        producer = world.services["producer"].vitals
        await world.until(lambda: stalled in str(producer.status_text))
        assert 0.5 * BUDGET < (await world.bus.usage(ROLLOUTS)).bytes < 0.8 * BUDGET
        if stalled == "trainer":
            world.reports_every = 1
            world.kill("trainer")  # and goes on at its last checkpoint, before all that
        world.start(stalled)
        await world.goes_on(100)
        await world.until(lambda: world.stopped_by() == "")
        assert "stream ROLLOUTS has room again" in caplog.text
        world.kill("producer")


async def test_a_stalled_reader_of_events_holds_those(start) -> None:
    streams = StreamsConfig(**{f: getattr(STREAMS, f) for f in STREAMS.__struct_fields__} | {"events_bytes": MIB})
    async with start(streams=streams) as world:
        world.start()
        await world.goes_on()
        world.kill("curriculum")
        await world.until(lambda: "needed by curriculum of sums" in world.stopped_by())
        assert "stream EVENTS is full" in world.stopped_by()
        world.start("curriculum")
        await world.goes_on()


@pytest.mark.parametrize("after", [0, 1, 2, 5])
async def test_a_governor_killed_while_it_trims_leaves_nothing_wrong(start, monkeypatch, after: int) -> None:
    purges, purge, reached = 0, trimming._purge, anyio.Event()

    async def stuck(*args, **kwargs):
        nonlocal purges
        purges += 1
        if purges > after and not reached.is_set():
            reached.set()
            await anyio.sleep_forever()
        return await purge(*args, **kwargs)

    monkeypatch.setattr(trimming, "_purge", stuck)
    async with start() as world:
        world.start()
        await world.until(reached.is_set)
        world.kill("governor")
        world.start("governor")
        await world.goes_on(100)
        world.kill("producer")
        await world.until(lambda: world.batches * 4 + 8 > world.published)
        world.kill()
        found = await audit(world.bus, RUN)
        assert found.violations == []
        assert found.entries > 0


async def test_a_hold_keeps_history_until_it_ends(start) -> None:
    async with start() as world:
        async with holding(world.bus, RUN, "replay-1", {ROLLOUTS: 5}, about="re-scoring with v2") as held:
            world.start()
            await world.until(lambda: f"{held.name} (re-scoring with v2)" in world.stopped_by())
            assert (await world.bus.get(ROLLOUTS, 5)).seq == 5
            with pytest.raises(NotFoundError):
                await world.bus.get(ROLLOUTS, 4)
            held.needs[ROLLOUTS] = 10**9  # read to the end: the next renewal says so
        await world.goes_on(100)
        world.kill("producer")
        with pytest.raises(NotFoundError, match="is kept from sequence"):
            async with holding(world.bus, RUN, "late", {ROLLOUTS: 5}, about="too late"):
                pass
        assert "too late" not in {hold.about for hold in (await read_record(world.bus, RUN)).holds.values()}


async def test_a_hold_that_yields_never_stops_the_run(start, caplog) -> None:
    async with start() as world:
        with pytest.raises(NotFoundError, match="gave way to the run"):  # noqa: PT012
            async with holding(world.bus, RUN, "shadow", {ROLLOUTS: 5}, about="a shadow", lease_s=8.0, yields=True):
                world.start()
                await anyio.sleep_forever()  # until a renewal finds that it is gone
        assert re.search(r"hold shadow-\w+ \(a shadow\) gives way", caplog.text)
        await world.until(lambda: world.published * 2 * TOKENS * 8 > 2 * BUDGET)


async def test_a_hold_that_nobody_renews_lapses(start, caplog) -> None:
    async with start() as world:
        with pytest.raises(NotFoundError, match="has lapsed"):  # noqa: PT012
            async with holding(world.bus, RUN, "gone", {ROLLOUTS: 1}, about="a replay", lease_s=2.0) as held:
                old = (await read_record(world.bus, RUN)).holds[held.name]
                past = type(old)(needs=old.needs, expires_ns=time.time_ns() - 1, about=old.about)
                await update_record(world.bus, RUN, lambda it: it.replace(holds={held.name: past}))
                await update_record(world.bus, RUN, lambda it: it.replace(holds={}))  # as a governor that trims does
                await anyio.sleep_forever()  # until the next renewal
        past_too = type(old)(needs={ROLLOUTS: 1}, expires_ns=time.time_ns() - 1, about="dead")
        await update_record(world.bus, RUN, lambda it: it.replace(holds={"dead": past_too}))
        world.start()
        await world.until(lambda: world.published * 2 * TOKENS * 8 > 2 * BUDGET)
        assert "hold dead (dead) was not renewed and has lapsed" in caplog.text
