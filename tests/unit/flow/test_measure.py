"""Two governors agree on one stream while each is interrupted by the other at the worst moment."""

from collections.abc import Awaitable, Callable

import pytest

from lachesis.pipeline.batching.config import BatchingConfig
from lachesis.pipeline.bus.api import Entry
from lachesis.pipeline.bus.memory import MemoryBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.flow.budget import Room
from lachesis.pipeline.flow.config import FlowConfig
from lachesis.pipeline.flow.logic import Governor
from lachesis.pipeline.flow.measure import Measure
from lachesis.pipeline.stage.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.errors import FencedError, SchemaError
from lachesis.schemas.subjects import BUCKETS, RESERVATIONS, ROLLOUTS

MOST = 100_000
CLOSE = 80_000


class Interrupted(MemoryBus):
    """Lets something happen once, before a record is read or after it was."""

    before_record: Callable[[], Awaitable[None]] | None = None
    after_record: Callable[[], Awaitable[None]] | None = None

    async def value(self, bucket: str, key: str) -> Entry | None:
        if self.before_record is not None:
            happens, self.before_record = self.before_record, None
            await happens()
        found = await super().value(bucket, key)
        if self.after_record is not None:
            happens, self.after_record = self.after_record, None
            await happens()
        return found


class Side:
    def __init__(self, bus: MemoryBus, run: str) -> None:
        self.service = Service(bus, "governor", run)
        config = RunConfig(run=run, batching=BatchingConfig(batch_size=8), flow=FlowConfig())
        self.governor = Governor(config.flow, config.batching, term=self.service.instance)
        self.measure = Measure(self.service, config, self.governor)

    @property
    def budget(self):
        return self.governor.budget

    @property
    def share(self) -> int:
        assert self.budget._share is not None
        return self.budget._share.own[ROLLOUTS]

    async def want(self, size: int) -> None:
        assert self.budget.refusal(Room(rollouts=size)) is not None
        await self.measure.take()


@pytest.fixture
async def bus():
    async with Interrupted(max_bytes={ROLLOUTS: MOST}) as bus:
        yield bus


async def test_whoever_writes_second_reads_again(bus: Interrupted) -> None:
    one, two = Side(bus, "one"), Side(bus, "two")
    await one.measure.take()
    await two.measure.take()
    assert (one.share, two.share) == (40_000, 20_000)

    async def interrupt() -> None:
        await two.want(40_000)

    bus.after_record = interrupt
    await one.want(60_000)
    assert two.share == 40_000
    assert one.share + two.share <= CLOSE


async def test_what_others_stored_and_no_longer_reserve_is_among_what_is_measured(bus: Interrupted) -> None:
    one, two = Side(bus, "one"), Side(bus, "two")
    await one.measure.take()
    await two.measure.take()
    await two.want(30_000)
    size = two.share
    two.budget.promise(Room(rollouts=size))

    async def interrupt() -> None:
        """It stores all of it, and gives back what it had reserved."""
        await bus.publish(subjects.rollout("two", "a"), bytes(size), msg_id="m")
        two.budget.release(Room(rollouts=size))
        await two.measure.take()

    bus.before_record = interrupt
    await one.want(70_000)
    held = (await bus.usage(ROLLOUTS)).bytes
    assert held >= size
    assert held + one.share + two.share <= CLOSE


async def test_a_later_governor_of_the_run_ends_the_earlier_one(bus: Interrupted) -> None:
    one, again = Side(bus, "one"), Side(bus, "one")
    await one.measure.take()
    await again.measure.take()
    with pytest.raises(FencedError, match="has taken over run one"):
        await one.measure.take()


async def test_nothing_is_promised_by_a_record_that_cannot_be_read(bus: Interrupted) -> None:
    one = Side(bus, "one")
    await bus.put(BUCKETS["retention"], RESERVATIONS, b"\xc1")
    with pytest.raises(SchemaError):
        await one.measure.take()
    assert one.budget.is_blind(0.0)
