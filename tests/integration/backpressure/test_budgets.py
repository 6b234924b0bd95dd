"""Disk: a stream at its stop stops the producers and says so, and everything goes on when there is room again. A group
of any size is stored whole within what was reserved for it, or refused.
"""

import random
from dataclasses import replace
from itertools import cycle

import anyio
import msgspec
import pytest
from integration.backpressure.world import RUN, World, make_config

from lachesis.pipeline.bus.api import StreamUsage
from lachesis.pipeline.bus.blobs import INLINE_BYTES
from lachesis.pipeline.bus.config import StreamsConfig
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.ledger.reader import fetch_batch
from lachesis.schemas import subjects
from lachesis.schemas.codec import decode
from lachesis.schemas.rollout import RolloutGroup

MIB = 1 << 20
NOISE = random.Random(1)


def resized(config: RunConfig, **tokens: int) -> RunConfig:
    """Return the configuration with other `longest_tokens`, by environment."""
    environments: dict[str, EnvironmentConfig] = dict(config.environments)
    for name, longest in tokens.items():
        environments[name] = msgspec.structs.replace(environments[name], longest_tokens=longest)
    return msgspec.structs.replace(config, environments=environments)


def noise(size: int) -> bytes:
    return NOISE.randbytes(size)


@pytest.mark.slow
async def test_a_stream_at_its_stop_stops_the_producers_who_say_so_and_go_on_when_space_is_freed(
    nats_bus: NatsBus, streams_config: StreamsConfig
) -> None:
    await nats_bus.ensure_streams(msgspec.structs.replace(streams_config, rollouts_bytes=2 * MIB))
    world = World(nats_bus, resized(make_config(words=8), words=1000))
    world.extra["words"] = lambda: noise(50_000)
    stop = world.config.flow.close_at * 2 * MIB
    reserved = 4 * (1000 * 16 + 4096)
    async with world.running():
        environment = world.services["environment-words"]
        with anyio.fail_after(60):  # what was just stored counts twice for a second, so the last few come slowly
            while (await nats_bus.usage(subjects.ROLLOUTS)).bytes <= stop - reserved:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        await world.until(lambda: "stream ROLLOUTS" in str(environment.vitals.status_text))
        await world.until(lambda: not world.governor.now.leased)
        await world.until(lambda: "raise" in str(environment.vitals.status_text))  # as soon as trimming has not helped
        assert environment.vitals.state == "backpressure"
        full = await nats_bus.usage(subjects.ROLLOUTS)
        print(f"stopped at {full.bytes} of {stop:g} bytes; {environment.vitals.retried} publications refused")
        assert stop - reserved < full.bytes <= stop
        assert environment.vitals.retried == 0, "the server had to refuse what the governor admitted"
        before = len(world.trainer.batches)
        fates = await world.fates()
        await nats_bus.trim(subjects.ROLLOUTS, [subjects.rollout(RUN)], before=min(full.last, max(fates) + 1))
        await world.trainer.until(before + 4)
    assert (await nats_bus.usage(subjects.ROLLOUTS)).bytes <= stop
    assert world.governor.worst == world.capacity


@pytest.mark.slow
async def test_what_the_server_itself_refuses_is_neither_lost_nor_stored_twice(
    nats_bus: NatsBus, streams_config: StreamsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The governor gets no budget, so the server refuses, and takes what comes when there is room."""
    await nats_bus.ensure_streams(msgspec.structs.replace(streams_config, rollouts_bytes=MIB))
    world = World(nats_bus, resized(make_config(words=8), words=1000))
    world.extra["words"] = lambda: noise(50_000)
    usage = nats_bus.usage

    async def blind(stream: str) -> StreamUsage:
        return replace(await usage(stream), max_bytes=1 << 40)

    found: dict[tuple[str, int, int], int] = {}
    refused = 0

    async def follow() -> None:
        async with nats_bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)]) as messages:
            async for message in messages:
                group = decode(RolloutGroup, message.data)
                key = (group.producer, group.epoch, group.counter)
                found[key] = found.get(key, 0) + 1

    monkeypatch.setattr(nats_bus, "usage", blind)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        async with world.running():
            environment = world.services["environment-words"]
            for _ in range(3):
                before = environment.vitals.retried
                await world.until(lambda: environment.vitals.retried >= before + 8)  # noqa: B023 - awaited right here
                await world.until(lambda: "maximum bytes exceeded" in str(environment.vitals.status_text))
                assert environment.vitals.state == "backpressure"
                assert environment.vitals.in_flight <= 8
                seen = max((await world.fates()).keys())
                await nats_bus.trim(subjects.ROLLOUTS, [subjects.rollout(RUN)], before=seen + 1)
            refused = environment.vitals.retried
            counted = len(found)
            await world.until(lambda: len(found) >= counted + 3)
            environment.drain()
            await world.until(lambda: environment.vitals.in_flight == 0)
        tasks.cancel_scope.cancel()
    print(f"{refused} refusals, {len(found)} groups stored")
    assert set(found.values()) == {1}, "stored twice"
    counters = sorted(counter for _, _, counter in found)
    assert counters[: len(counters) - 8] == list(range(len(counters) - 8)), "a group that was generated is lost"


@pytest.mark.slow
async def test_a_group_larger_than_a_message_is_stored_whole_trained_and_bounded(nats_bus: NatsBus) -> None:
    world = World(nats_bus, resized(make_config(words=2, large=1), large=200_000))
    world.extra["large"] = lambda: noise(INLINE_BYTES + MIB)
    async with world.running():
        await world.until(lambda: any(ref.env == "large" for batch in world.trainer.batches for ref in batch.groups))
        batch = next(b for b in world.trainer.batches if any(ref.env == "large" for ref in b.groups))
        payloads = await fetch_batch(nats_bus, batch)
    assert max(len(group.task["extra"]) for _, group, _ in payloads) == INLINE_BYTES + MIB
    await world.assert_bounded(at_least=8)


async def test_a_group_larger_than_its_lease_is_refused_and_stands_in_nobodys_way(nats_bus: NatsBus) -> None:
    world = World(nats_bus, make_config(words=2, liar=2))
    sizes = cycle([100_000] * 4 + [10])  # never as many in a row as end an environment
    world.extra["liar"] = lambda: noise(next(sizes))
    async with world.running():
        liar = world.services["environment-liar"].vitals
        await world.until(lambda: "raise longest_tokens of environment liar" in str(liar.status_text))
        await world.trainer.until(10)
    largest = 4 * (64 * 16 + 4096)
    async with nats_bus.read(subjects.ROLLOUTS, [subjects.rollout(RUN)], follow=False) as messages:
        assert max([len(message.data) async for message in messages]) <= largest
    assert {ref.env for batch in world.trainer.batches for ref in batch.groups} >= {"words"}
    await world.assert_bounded(at_least=8)
