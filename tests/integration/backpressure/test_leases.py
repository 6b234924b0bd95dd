"""Leases fail closed: without a governor nothing begins, what a dead environment held comes back, and a group that can
never be admitted holds up no other.
"""

import time

import anyio
import msgspec
import pytest
from integration.backpressure.world import World, make_config

from lachesis.pipeline.bus.jetstream import NatsBus

RUN = "r"


@pytest.mark.slow
async def test_without_a_governor_nothing_begins_and_with_the_next_one_the_run_goes_on(nats_bus: NatsBus) -> None:
    world = World(nats_bus, make_config(words=8))
    world.inference.delay_s["words"] = 0.02
    async with world.running():
        await world.trainer.until(5)
        environment = world.services["environment-words"].vitals
        world.kill("governor")
        await world.until(lambda: environment.state == "waiting" and "governor" in str(environment.status_text))
        await anyio.sleep(1.5 * world.config.flow.lease_s)
        granted = world.governor.granted
        assert len(world.inference.began_ns) <= granted, "generated without a lease"
        began = len(world.inference.began_ns)
        back_ns = time.time_ns()
        await world.start("governor")
        await world.trainer.until(len(world.trainer.batches) + 5)
    pause_s = (world.inference.began_ns[began] - back_ns) / 1e9
    print(f"{granted} groups granted before; the next one began {pause_s:.2f} s after the governor's return")
    assert pause_s >= world.config.flow.lease_s, "granted while leases of the life before might still be used"
    await world.assert_bounded()


@pytest.mark.slow
async def test_what_a_killed_environment_held_expires_and_its_capacity_returns(nats_bus: NatsBus) -> None:
    world = World(nats_bus, make_config(words=8))
    world.inference.gate = anyio.Event()  # its requests never come back
    async with world.running():
        await world.until(lambda: world.governor.now.leased == world.capacity)
        renewals = 1.5 * world.config.flow.lease_s
        await anyio.sleep(renewals)
        assert world.governor.now.leased == world.capacity, "leases of a live environment ran out"
        world.kill("environment-words")
        killed = time.monotonic()
        world.inference.gate.set()
        await world.start("environment-words", replica=2)
        await world.until(lambda: world.governor.granted > world.capacity // 4)
        print(f"granted again {time.monotonic() - killed:.2f} s after the kill")
        await world.trainer.until(5)
        assert world.governor.now.metrics()["flow/expired"] == world.capacity // 4
    assert world.governor.worst <= world.capacity
    assert len({group.producer for _, group in await world.groups()}) == 1


async def test_a_group_larger_than_any_budget_is_refused_and_blocks_nobody(nats_bus: NatsBus) -> None:
    config = make_config(words=4, huge=4)
    huge = msgspec.structs.replace(config.environments["huge"], longest_tokens=10_000_000)
    environments = {**config.environments, "huge": huge}
    world = World(nats_bus, msgspec.structs.replace(config, environments=environments))
    async with world.running():
        await world.trainer.until(10)
        reason = str(world.services["environment-huge"].vitals.status_text)
    print(reason)
    assert "in stream ROLLOUTS can never be admitted" in reason
    assert "streams.rollouts_bytes" in reason
    assert all(batch.complete for batch in world.trainer.batches), "a smaller batch was formed for its sake"
    await world.assert_bounded(at_least=4)
