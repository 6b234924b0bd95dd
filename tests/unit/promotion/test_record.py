"""What a service makes of a promotion that another build wrote, and how often who judges is looked up."""

from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from stages import run_scorer

from lachesis.pipeline.bus.api import StreamExtent
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.errors import DamagedError, InfrastructureError
from lachesis.pipeline.promotion.record import ActivePromotion, write_promotions
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import subjects
from lachesis.schemas.annotations import DeadLetter, ScoreEvent
from lachesis.schemas.codec import SCHEMA_VERSION
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.promotion import Promotion, Promotions
from lachesis.services.promotion import config_under_promotion, make_promotion

CONFIG = RunConfig(
    run="r",
    environments={"sums": EnvironmentConfig(kind="x")},
    scoring=ScoringConfig(raters=[RaterConfig(rater="exact_match")]),
)


def promoted(**normalization) -> Promotion:
    one = make_promotion(CONFIG, "new", by="me", asked_ns=1)
    sums = one.environments["sums"]
    judging = msgspec.structs.replace(sums, normalization={**sums.normalization, **normalization})
    return msgspec.structs.replace(one, environments={"sums": judging}, first=2)


@pytest.mark.parametrize("setting", [{"of_a_newer_build": 1}, {"window": -1}])
def test_settings_that_this_build_does_not_take_say_what_to_do(setting):
    with pytest.raises(ConfigError, match=r"revision new, environment sums: .*; upgrade this service"):
        config_under_promotion(promoted(**setting), CONFIG)


async def test_scorers_wait_with_what_a_newer_build_judges_and_go_on_with_the_rest(lab):
    await lab.store(lab.group(1, task={"answer": "2"}))
    listed = Promotions(run="r", promotions=[promoted(of_a_newer_build=1)])
    assert await write_promotions(lab.bus, listed, "live", expected=0) == 2
    await lab.store(lab.group(2, task={"answer": "2"}))
    async with lab.running(lambda service: run_scorer(service, CONFIG), "scorer") as service:

        async def waiting() -> bool:
            return service.vitals.retried >= 2 and bool(await lab.events("score", ScoreEvent))

        await lab.until(waiting)
    assert [item.seq for event in await lab.events("score", ScoreEvent) for item in event.groups] == [1]


async def test_one_look_serves_all_that_the_server_has(lab, monkeypatch):
    await lab.store(lab.group(1))
    await write_promotions(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    for n in (2, 3):
        await lab.store(lab.group(n))
    in_force = ActivePromotion(lab.bus, "r", "live")
    found = [await in_force.promotion_at(seq) for seq in (3, 1)]
    assert [one and one.first for one in found] == [2, None]
    monkeypatch.setattr(lab.bus, "read", None)
    monkeypatch.setattr(lab.bus, "extent", None)
    assert (await in_force.promotion_at(4)).first == 2


class LagsBehind:
    """A server's view of the bus that ends at `last_seq` of every stream, though it leads them by its own account."""

    def __init__(self, bus, last_seq: int) -> None:
        self._bus, self.last_seq = bus, last_seq

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def last(self, stream, subject):
        found = await self._bus.last(stream, subject)
        return found if found is not None and found.seq <= self.last_seq else None

    async def extent(self, stream, subject):
        async with self.read(stream, [subject], follow=False) as messages:
            return StreamExtent(self.last_seq, len([message async for message in messages]))

    @asynccontextmanager
    async def read(self, stream, filters, **options):
        async def whole(messages):
            async for message in messages:
                if message.seq <= self.last_seq:
                    yield message

        async with self._bus.read(stream, filters, **options) as messages:
            yield whole(messages)


async def test_nobody_judges_by_the_list_of_a_server_that_lags_behind(lab):
    await lab.store(lab.group(1))
    await write_promotions(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    await lab.store(lab.group(2))
    old = LagsBehind(lab.bus, 1)
    in_force = ActivePromotion(old, "r", "live")
    assert await in_force.promotion_at(1) is None, "any later promotion begins behind it"
    with pytest.raises(InfrastructureError, match="ROLLOUTS ends at 1 on a server that lags behind: 3 is stored"):
        await in_force.promotion_at(3)
    old.last_seq = 3
    assert (await in_force.promotion_at(3)).first == 2
    old.last_seq = 1
    with pytest.raises(InfrastructureError, match="lags behind"):
        await in_force.promotion_at(4)
    assert (await in_force.promotion_at(3)).first == 2, "what is known stays known"


async def test_a_list_may_lag_behind_the_answer_that_there_is_one(lab):
    """Two servers that both believe to lead: the one says how many lists there are, the other has fewer."""
    await write_promotions(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    await lab.store(lab.group(1))
    old = LagsBehind(lab.bus, 0)
    old.extent = lab.bus.extent
    in_force = ActivePromotion(old, "r", "live")
    with pytest.raises(InfrastructureError, match="0 lists on a server that lags behind"):
        await in_force.promotion_at(2)
    old.last_seq = 2
    assert (await in_force.promotion_at(2)).first == 2


async def test_a_list_of_a_newer_build_is_waited_for_and_buries_nothing(lab):
    await write_promotions(
        lab.bus, Promotions(run="r", promotions=[promoted()], v=SCHEMA_VERSION + 1), "live", expected=0
    )
    await lab.store(lab.group(1))
    said = msgspec.msgpack.encode({"v": 1, "schema_version": SCHEMA_VERSION + 1})

    async def beat():
        while True:
            await lab.bus.broadcast(subjects.heartbeat("r", "batcher", "i"), said)
            await anyio.sleep(0.01)

    async with background() as tasks:
        tasks.start_soon(beat)
        with pytest.raises(InfrastructureError, match="upgrade this service"):
            await ActivePromotion(lab.bus, "r", "live").promotion_at(2)


async def test_a_scorer_waits_for_a_server_that_lags_behind_and_then_judges_by_the_newest_list(lab):
    await lab.store(lab.group(1, task={"answer": "2"}))
    await write_promotions(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    await lab.store(lab.group(2, task={"answer": "2"}))

    async def judged() -> list[tuple[int, int | None]]:
        return [(item.seq, event.promoted) for event in await lab.events("score", ScoreEvent) for item in event.groups]

    async def main(service):
        service.bus = LagsBehind(service.bus, 1)
        await run_scorer(service, CONFIG)

    async with lab.running(main, "scorer") as service:

        async def waiting() -> bool:
            return service.vitals.retried >= 2 and bool(await judged())

        await lab.until(waiting)
        assert "lags behind" in service.vitals.status_text
        assert await judged() == [(1, None)]
        service.bus.last_seq = 3

        async def both() -> bool:
            return len(await judged()) == 2

        await lab.until(both)
    assert await judged() == [(1, None), (3, 2)]
    assert not await lab.events("dead", DeadLetter)


async def test_a_damaged_list_is_not_taken_for_a_server_that_lags_behind(lab):
    await lab.store(lab.group(1))
    first = await write_promotions(lab.bus, Promotions(run="r", promotions=[promoted()]), "live", expected=0)
    both = [promoted(), msgspec.structs.replace(promoted(), first=3)]
    second = await write_promotions(lab.bus, Promotions(run="r", promotions=both), "live", expected=first)
    lab.bus.damage("ROLLOUTS", first)
    assert (
        len(await ActivePromotion(lab.bus, "r", "live").promotions_known_at(second)) == 2
    )  # each list holds those before it as well
    lab.bus.damage("ROLLOUTS", second)
    with pytest.raises(DamagedError):
        await ActivePromotion(lab.bus, "r", "live").promotions_known_at(second)
