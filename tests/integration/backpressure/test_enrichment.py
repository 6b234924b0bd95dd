"""Slow raters, and a teacher that is slow, silent or away, wanted or required: what waits for them stays within the
bound, and a deadline ends the wait where there is one.
"""

import anyio
import pytest
from integration.backpressure import raters
from integration.backpressure.world import World, make_config

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig

RUN = "r"

ALL = ("governor", "batcher", "normalizer", "scorer", "teacher", "environment-words")


async def test_slow_raters_hold_two_rounds_of_groups_and_the_rest_waits_in_the_stream(nats_bus: NatsBus) -> None:
    rater = RaterConfig(rater="integration.backpressure.raters:slow", params={"seconds": 0.15}, concurrency=64)
    world = World(nats_bus, make_config(words=8, scoring=ScoringConfig(raters=[rater], groups_at_once=2)))
    held = 0
    async with world.running():
        while len(world.trainer.batches) < 5:
            await anyio.sleep(0.01)
            if "scorer" in world.services:
                held = max(held, world.services["scorer"].vitals.in_flight)
    print(f"the scorer held {held} groups at most")
    assert 0 < held <= 2 * 2
    await world.assert_bounded()
    assert set((await world.fates()).values()) == {"batched"}


@pytest.mark.slow
async def test_raters_that_are_away_stop_the_run_within_the_bound_and_cost_nothing(
    nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raters, "is_away", True)
    rater = RaterConfig(rater="integration.backpressure.raters:remote", retries=0, breaker_s=0.1)
    world = World(nats_bus, make_config(words=8, scoring=ScoringConfig(raters=[rater], groups_at_once=2, patience_s=0)))
    async with world.running():
        await world.until_full()
        full = world.governor.granted
        scorer = world.services["scorer"].vitals
        await world.until(lambda: scorer.given_back > 2 * full)  # every group had its turn, and most had two
        assert scorer.state == "waiting"
        assert world.governor.granted == full
        assert not world.trainer.batches
        monkeypatch.setattr(raters, "is_away", False)
        await world.trainer.until(4)
    assert set((await world.fates()).values()) <= {"batched", "stale"}  # who waits seconds is overtaken by many steps
    await world.assert_bounded()


async def test_a_silent_teacher_that_is_optional_costs_its_deadline_and_no_group(nats_bus: NatsBus) -> None:
    batching = {"teacher": "optional", "teacher_deadline_s": 0.4}
    world = World(nats_bus, make_config(words=8, batching=batching))
    world.teacher.delay_s = None
    async with world.running(*ALL):
        await world.trainer.until(6)
    assert world.teacher.calls > 0
    assert all(ref.teacher is None for batch in world.trainer.batches for ref in batch.groups)
    await world.assert_bounded()


@pytest.mark.parametrize("teacher", ["optional", "required"])
async def test_a_slow_teacher_that_is_waited_for_slows_everything_within_the_bound(
    nats_bus: NatsBus, teacher: str
) -> None:
    world = World(nats_bus, make_config(words=8, batching={"teacher": teacher, "teacher_deadline_s": 30.0}))
    world.teacher.delay_s = 0.2
    async with world.running(*ALL):
        await world.trainer.until(4)
    assert all(ref.teacher is not None for batch in world.trainer.batches for ref in batch.groups)
    await world.assert_bounded()


@pytest.mark.slow
async def test_a_silent_teacher_that_is_required_costs_groups_at_its_deadline_and_gives_their_room_back(
    nats_bus: NatsBus,
) -> None:
    world = World(nats_bus, make_config(words=8, batching={"teacher": "required", "teacher_deadline_s": 2.0}))
    world.teacher.delay_s = None
    rounds = 3
    async with world.running(*ALL):
        groups = rounds * world.capacity // 4
        await world.until(lambda: world.governor.granted > groups)  # more than fit at once: the first gave way
        world.teacher.delay_s = 0.0
        world.kill("teacher")  # what it holds comes again to the next one, though late for most
        await world.start("teacher")
        await world.trainer.until(2)
    fates = list((await world.fates()).values())
    assert fates.count("unscorable") >= (rounds - 1) * world.capacity // 4
    assert set(fates) <= {"unscorable", "batched", "stale"}
    assert all(ref.teacher is not None for batch in world.trainer.batches for ref in batch.groups)
    await world.assert_bounded()


@pytest.mark.slow
async def test_a_required_teacher_without_a_deadline_stops_the_run_until_it_comes(nats_bus: NatsBus) -> None:
    world = World(nats_bus, make_config(words=8, batching={"teacher": "required", "teacher_deadline_s": None}))
    async with world.running(*(name for name in ALL if name != "teacher")):
        await world.until_full()
        full = world.governor.granted
        await anyio.sleep(1.5 * world.config.flow.lease_s)
        assert world.governor.granted == full
        assert not world.trainer.batches
        await world.start("teacher")
        await world.trainer.until(5)
    assert set((await world.fates()).values()) == {"batched"}
    await world.assert_bounded()
