"""Stages and `lachesis.batches` on a real server, which is killed under them."""

import asyncio
import gc
import os
import signal

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch
from stages import run_scorer

import lachesis
from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.model.policy import build_tiny_policy
from lachesis.pipeline.runtime.service import Service
from lachesis.pipeline.scorer.config import RaterConfig, ScoringConfig
from lachesis.schemas import keys, subjects
from lachesis.schemas.annotations import DeadLetter, ScoreEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.control import PolicyRecord

_KEPT = []
CONFIG = RunConfig(run="r", scoring=ScoringConfig(raters=[RaterConfig(rater="length")]))


@pytest.fixture
async def bus(fresh_server, streams_config, anyio_backend):
    async with await connect(fresh_server.url, run="r", name="stages", token=fresh_server.token) as connected:
        await connected.ensure_streams(streams_config)
        yield connected


@pytest.mark.slow
async def test_two_scorers_score_every_group_over_kills_of_the_server(bus, fresh_server, streams_config, make_lab):
    lab = make_lab(bus)
    services = []

    async def scorer():
        async with await connect(fresh_server.url, run="r", name="scorer", token=fresh_server.token) as own:
            services.append(Service(own, "scorer", "r"))
            await run_scorer(services[-1], CONFIG)

    async def all_settled():
        scored = {item.group for event in await lab.events("score", ScoreEvent) for item in event.groups}
        return len(scored) == 120 and len(await lab.events("dead", DeadLetter)) == 1

    with anyio.fail_after(200):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(scorer)
            tasks.start_soon(scorer)
            await bus.publish(subjects.rollout("r", "sums"), b"\xc1", msg_id="bad")
            for n in range(120):
                await lab.store(lab.group(n))
                if n in (40, 80):
                    os.kill(fresh_server.pid, signal.SIGKILL)
                    await fresh_server.wait()
                    await fresh_server.stop()
                    await fresh_server.start()
            async with bus.read(subjects.EVENTS, []) as events:
                while not await all_settled():
                    await anext(aiter(events))
            for service in services:
                service.drain()
    lag = await bus.lag(subjects.ROLLOUTS, subjects.durable("scorer", "r", "live"))
    assert lag.pending == 0
    # A killed server forgets the acknowledgements of its last moments: those groups come again, and say the same.
    items = {}
    for event in await lab.events("score", ScoreEvent):
        for item in event.groups:
            same = msgspec.structs.replace(item, stamps=[])
            assert items.setdefault(item.group, same) == same


async def test_batches_by_url_and_by_folder_with_commit_and_resume(bus, fresh_server, make_lab, tmp_path):
    lab = make_lab(bus)
    policy = build_tiny_policy(0, width=16, layers=1, heads=2, max_length=32)
    await lab.extend_ledger(*([lab.group(n, tokenizer_hash=policy.tokenizer_hash)] for n in range(4)))
    url = fresh_server.url.replace("nats://", f"nats://{fresh_server.token}@")
    with anyio.fail_after(120):
        async with lachesis.batches("r", nats=url) as batches:
            async for batch in batches:
                assert batch.packed.tokens_BT.dtype == torch.int64
                version = await batch.publish(policy.model, policy.tokenizer, tmp_path / "weights")
                await batch.commit(policy_version=version, checkpoint=f"step-{batch.number}")
                if batch.number == 1:
                    break
        numbers = []
        async for batch in lachesis.batches("r", nats=bus):
            numbers.append(batch.number)
            if len(numbers) == 2:
                break
    assert numbers == [2, 3]
    entry = await bus.value(keys.POLICY)
    assert decode(PolicyRecord, entry.value).version == version


async def _leave_by_break(batches):
    found = []
    async for batch in batches:
        found.append(batch.number)
        break
    return found[0]


async def _leave_a_kept_iterator(batches):
    _KEPT.append(aiter(batches))
    return (await anext(_KEPT[-1])).number


async def _leave_by_cancel(batches):
    found = []
    with anyio.CancelScope() as scope:
        async for batch in batches:
            found.append(batch.number)
            scope.cancel()
    return found[0]


@pytest.mark.parametrize("opened", [False, True])
async def test_a_loop_that_is_left_before_the_bus_is_closed_ends_in_silence(bus, fresh_server, make_lab, opened):
    lab = make_lab(bus)
    await lab.extend_ledger(*([lab.group(n)] for n in range(4)))
    unhandled = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    with anyio.fail_after(60):
        for leave in (_leave_by_break, _leave_by_cancel, _leave_a_kept_iterator):
            before = asyncio.all_tasks()
            async with await connect(fresh_server.url, run="r", name="own", token=fresh_server.token) as own:
                batches = lachesis.batches("r", nats=own)
                if opened:
                    async with batches:
                        assert await leave(batches) == 0
                else:
                    assert await leave(batches) == 0
            _KEPT.clear()
            left = asyncio.all_tasks() - before
            await asyncio.wait(left) if left else None
            del left, batches
            gc.collect()  # only then asyncio speaks of an exception that was never retrieved
            await anyio.lowlevel.checkpoint()
    assert unhandled == []
