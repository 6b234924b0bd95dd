"""The trainer is the slowest part, or stands still: nothing piles up beyond the capacity, and all goes on with it."""

import time
from collections import Counter

import anyio
import pytest
from integration.backpressure.world import World, make_config

from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects

RUN = "r"


@pytest.mark.slow
async def test_a_stopped_trainer_stops_everything_within_the_bound_and_everything_returns_with_it(
    nats_bus: NatsBus,
) -> None:
    """A lease period and a half stands for a stopped trainer's minutes: nothing else in the run has a longer memory."""
    world = World(nats_bus, make_config(words=8))
    async with world.running():
        await world.trainer.until(5)
        world.trainer.stop()
        await world.until_full()
        stored = (await nats_bus.usage(subjects.ROLLOUTS)).last
        began = len(world.inference.began_ns)
        rest = time.monotonic() + 1.5 * world.config.flow.lease_s
        while time.monotonic() < rest:
            await anyio.sleep(0.05)
            assert world.governor.now.outstanding <= world.capacity == 24
            assert nats_bus._publisher._window.bytes <= 1 << 20
        assert (await nats_bus.usage(subjects.ROLLOUTS)).last == stored, "stored while the trainer stood still"
        assert len(world.inference.began_ns) == began, "generated while the trainer stood still"
        assert world.services["environment-words"].vitals.state == "backpressure"
        assert "sequences are outstanding" in str(world.services["environment-words"].vitals.status_text)

        asked = len(world.governor.answers)
        trained = world.trainer.batches[-1].number + 1
        world.trainer.go_on()
        await world.until(lambda: len(world.inference.began_ns) > began)
        returned_s = (world.inference.began_ns[began] - world.trainer.trained_ns[trained]) / 1e9
        print(f"generating again {returned_s:.3f} s after the first step")
        waits = [reply.retry_s for _, _, reply, _, _ in world.governor.answers[asked:] if not reply.granted]
        assert max(waits, default=0.0) <= world.config.flow.retry_s, "a producer was told to wait for longer"
        await world.trainer.until(trained + 5)
    batches = world.trainer.batches
    assert all(batch.number - ref.policy_step <= 2 for batch in batches for ref in batch.groups)
    await world.assert_bounded()


@pytest.mark.slow
async def test_64_producers_at_once_never_pass_the_bound(nats_bus: NatsBus) -> None:
    config = make_config(batching={"batch_size": 16, "max_staleness": 1}, retry_s=0.5, words=2)
    world = World(nats_bus, config, step_s=0.02)
    world.inference.delay_s["words"] = 0.005
    world.inference.gate = anyio.Event()
    async with world.running("governor", "batcher", "normalizer", "scorer"):
        environments: list[Service] = []

        async def begin(replica: int) -> None:
            environments.append(await world.start("environment-words", replica=replica))

        async with anyio.create_task_group() as starts:
            for replica in range(1, 65):
                starts.start_soon(begin, replica)
        await world.until(lambda: all(one.started.is_set() for one in environments))  # else the first take everything
        world.inference.gate.set()
        await world.trainer.until(25)
    await world.assert_bounded()
    producers = Counter(group.producer for _, group in await world.groups())
    print(f"{len(producers)} producers stored {producers.total()} groups")
    assert world.capacity == 32
    assert len(producers) >= 16, "a few producers take everything"


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_15_slow_environments_get_their_part_and_a_fast_one_the_rest(
    nats_bus: NatsBus, max_staleness: int
) -> None:
    slow = [f"slow{i}" for i in range(15)]
    world = World(
        nats_bus,
        make_config(
            batching={"batch_size": 64, "max_staleness": max_staleness}, lease_s=20.0, fast=32, **dict.fromkeys(slow, 1)
        ),
        step_s=0.1,
    )
    world.inference.delay_s |= dict.fromkeys(slow, 0.05)
    steps = 12
    async with world.running():
        await world.trainer.until(steps)
    await world.assert_bounded()
    sequences = Counter(dict.fromkeys((*slow, "fast"), 0))
    for batch in world.trainer.batches:
        for ref in batch.groups:
            sequences[ref.env] += ref.sequences
    equal = 64 * len(world.trainer.batches) / 16
    least = min(slow, key=lambda env: sequences[env])
    check_that_waits_are_kept(world, slow)
    print(f"an equal part is {equal:g}; {least} got {sequences[least]}, fast got {sequences['fast']}")
    assert sequences[least] >= 4 * (steps // 6), "a slow environment starves"
    assert sequences["fast"] >= equal, "the fast one may not use what the slow ones leave"


def check_that_waits_are_kept(world: World, slow: list[str]) -> None:
    """A slow environment that holds nothing and was refused finds what it waits for still free, whatever came first.

    One that has sent no request for a while is forgotten, as it is after a pause of this process.
    """
    waiting: dict[str, tuple[int, float]] = {}
    patience_s = 4 * world.config.flow.retry_s + 1.0
    for at_s, request, reply, held, free in world.governor.answers:
        waiting = {env: wait for env, wait in waiting.items() if at_s - wait[1] <= patience_s}
        if request.op != "acquire":
            continue
        if request.env in slow:
            if reply.granted:
                waiting.pop(request.env, None)
            elif held == 0 and "sequences are outstanding" in str(reply.reason):
                waiting[request.env] = request.sequences, at_s
        elif reply.granted and held > 0:
            wanted = sum(sequences for sequences, _ in waiting.values())
            assert free >= wanted, f"the fast one was granted what slow ones wait for: {waiting} at {at_s}"
