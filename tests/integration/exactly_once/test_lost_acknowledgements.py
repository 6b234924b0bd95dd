"""Every stage and the ledger where acknowledgements are lost, groups come again, and rollouts are published twice."""

import random
from collections import Counter, defaultdict
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from integration.batcher.test_batcher import ENV, RUN, World, batcher, fates, make_config, read_until
from stages import run_batcher, run_curriculum, run_normalizer, run_scorer

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.config.run import EnvironmentConfig
from lachesis.pipeline.errors import FencedError, InfrastructureError
from lachesis.pipeline.ledger.chain import LedgerPosition
from lachesis.pipeline.ledger.reader import follow_ledger
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.trainer.feed import BatchFeed
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import CurriculumEvent, RewardEvent, ScoreEvent
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.control import PolicyRecord
from lachesis.schemas.planning_header import PLAN_HEADER, Plan

from .conftest import SUMS

CONFIG = msgspec.structs.replace(
    make_config(),
    environments={ENV: EnvironmentConfig(kind=f"{SUMS}:Sums", samples=4)},
    normalization=NormalizationConfig(window=4),
)


class Lossy:
    """One process's view of the bus. The first of what it stores, and a third of it, is stored without its knowing."""

    def __init__(self, bus, seed):
        self._bus = bus
        self._rng = random.Random(seed)
        self.lost = 0

    def __getattr__(self, name):
        return getattr(self._bus, name)

    def _loses(self):
        lost = not self.lost or self._rng.random() < 1 / 3
        self.lost += lost
        return lost

    async def _call(self, name, *args, **kwargs):
        answer = await getattr(self._bus, name)(*args, **kwargs)
        if self._loses():
            raise InfrastructureError(f"{name}: the acknowledgement was lost")
        return answer

    async def publish(self, *args, **kwargs):
        return await self._call("publish", *args, **kwargs)

    async def commit(self, *args, **kwargs):
        return await self._call("commit", *args, **kwargs)

    async def put(self, *args, **kwargs):
        return await self._call("put", *args, **kwargs)

    @asynccontextmanager
    async def consume(self, *args, **kwargs):
        async with self._bus.consume(*args, **kwargs) as deliveries:
            yield self._again(deliveries)

    async def _again(self, deliveries):
        async for delivery in deliveries:
            yield _Delivery(self, delivery)


class _Delivery:
    def __init__(self, bus, delivery):
        self._bus = bus
        self._delivery = delivery

    def __getattr__(self, name):
        return getattr(self._delivery, name)

    async def ack(self):
        await (self._delivery.nak() if self._bus._loses() else self._delivery.ack())


STAGES = [("scorer", run_scorer)] * 2 + [
    ("normalizer", run_normalizer),
    ("curriculum", run_curriculum),
    ("batcher", run_batcher),
]


async def events(bus, kind, model):
    async with bus.read(subjects.EVENTS, [subjects.event(kind, RUN, "live", ENV)], follow=False) as messages:
        return [decode(model, message.data) async for message in messages]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
async def test_everything_takes_effect_once(nats_server, nats_bus, make_lab, seed):
    lab, lossy, repeats, firsts = make_lab(nats_bus), defaultdict(list), [], {}

    async def live(number, name, main):
        async with await connect(nats_server.url, run=RUN, name=name, token=nats_server.token) as own:
            view = Lossy(own, seed * 10 + number)
            lossy[name].append(view)
            await main(Service(view, name, RUN), CONFIG)

    async def settled():
        return fates([entry async for entry in follow_ledger(nats_bus, RUN, "main", LedgerPosition(), follow=False)])

    async with anyio.create_task_group() as tasks:
        for number, (name, main) in enumerate(STAGES):
            tasks.start_soon(live, number, name, main)
        for n in range(32):
            group = lab.group(n, env=ENV, samples=4, item=f"0+{n}")
            firsts[await lab.store(group)] = group
            if n % 4 == 3:  # once more under its id, which the broker drops, and under another one, which it stores
                assert await lab.store(group) in firsts
                headers = {PLAN_HEADER: Plan.of(group).pack()}
                subject = subjects.rollout(RUN, ENV)
                repeats.append((await nats_bus.publish(subject, encode(group), msg_id=f"r{n}", headers=headers)).seq)
        with anyio.fail_after(60):
            async with nats_bus.read(subjects.LEDGER, [subjects.ledger(RUN, "main")]) as entries:
                while len(await settled()) < len(firsts) + len(repeats):
                    await anext(aiter(entries))
        tasks.cancel_scope.cancel()

    assert all(sum(view.lost for view in views) > 0 for views in lossy.values())  # of two scorers one may do it all
    assert await settled() == dict.fromkeys(firsts, "batched") | dict.fromkeys(repeats, "duplicate")
    rewards = await events(nats_bus, "reward", RewardEvent)
    assert [event.commit.index for event in rewards] == list(range(len(rewards)))
    assert max(Counter(item.seq for event in rewards for item in event.groups).values()) == 1
    learned = await events(nats_bus, "curriculum", CurriculumEvent)
    assert [event.commit.index for event in learned] == list(range(len(learned)))
    assert max(Counter(name for event in learned for name in event.observed).values()) == 1
    scores = {}
    for event in await events(nats_bus, "score", ScoreEvent):
        for item in event.groups:
            assert scores.setdefault(item.seq, item.scores) == item.scores


async def test_a_rollout_that_comes_again_after_every_dedup_window_is_a_duplicate(fresh_server, streams_config):
    short = msgspec.structs.replace(streams_config, duplicate_window_s=1.0)
    async with await connect(fresh_server.url, run=RUN, name="tests", token=fresh_server.token) as bus:
        await bus.ensure_streams(short)
        world = World(bus)
        async with batcher(bus, make_config()):
            first = [await world.rollout() for _ in range(2)]
            await world.reward(*first)
            await read_until(bus, batches=1)
        again = first[0][0]
        with anyio.fail_after(60):
            while again == first[0][0]:  # until the broker has forgotten the message id
                again = await world.publish(first[0][1], f"rollout.{first[0][1].id}")
                await anyio.sleep(0.05)
        async with batcher(bus, make_config()):  # a later life, that has not seen the first one
            assert fates(await read_until(bus, outcomes=3)) == {seq: "batched" for seq, _ in first} | {
                again: "duplicate"
            }


async def test_a_policy_whose_storing_went_unheard_is_not_another_trainers(nats_bus):
    def record(version):
        return PolicyRecord(run=RUN, version=version, weights="w", tokenizer_hash="t", written_ns=1)

    feed = await BatchFeed.open(nats_bus, RUN, "main", term="a")
    await feed.publish_policy(record("1-a-b"))
    revision = (await nats_bus.value(keys.POLICY)).revision
    await nats_bus.put(keys.POLICY, encode(record("2-a-c")), revision=revision)  # ours, unheard
    await feed.publish_policy(record("2-a-c"))
    await feed.publish_policy(record("3-a-d"))
    other = await BatchFeed.open(nats_bus, RUN, "main", term="b")
    await other.publish_policy(record("2-b-c"))
    with pytest.raises(FencedError):
        await feed.publish_policy(record("4-a-e"))
