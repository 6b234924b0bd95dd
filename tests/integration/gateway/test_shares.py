"""Environments that post flat out, more than the run can train on: batches hold the shares of `batching.mix`."""

from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import anyio
import httpx
import pytest
from integration.gateway.test_gateway import Client
from integration.gateway.world import MAX_STALENESS, World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

RUN = "g"
WORKERS, FULL_AFTER, BATCHES = 12, 6, 30
"""The first batches are made of what there was before all posted."""


class Case(NamedTuple):
    """`samples` of the environments without four in a group; `slow` takes a while for each.

    `step_s`: seconds that a step takes at least, so that even the slow one posts more than its share of them.
    """

    weights: dict[str, int]
    batch_size: int
    samples: dict[str, int] = {}
    slow: str | None = None
    step_s: float = 0.0


@pytest.mark.parametrize(
    "case",
    [
        Case({"words": 1, "sums": 2, "code": 4}, 28),
        Case({"words": 1, "sums": 3}, 32, slow="sums", step_s=0.3),
        Case({"words": 1, "sums": 10}, 44),
        Case({"words": 1, "sums": 1, "code": 1}, 48, {"sums": 8, "code": 16}),
    ],
    ids=["1:2:4", "1:3-the-larger-is-slow", "1:10", "groups-of-4-8-16"],
)
async def test_environments_that_post_flat_out_have_their_shares_of_the_batches(
    case: Case, nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    """Where the trainer takes no time, all that is granted is soon trained: no wait of it evens the shares out."""
    weights, batch_size, samples, slow, step_s = case
    mix = f"{{ {', '.join(f'{env} = {weight}.0' for env, weight in weights.items())} }}"
    largest = max(samples.get(env, 4) for env in weights)
    step = partial(anyio.sleep, step_s)
    world = World(
        nats_bus, nats_server, tmp_path, batch_size=batch_size, mix=mix, environments=list(weights), before_step=step
    )
    numbers = count()
    registered: list[str] = []

    async def environment(env: str) -> None:
        size = samples.get(env, 4)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False, limits=limits) as http:
            client = Client(http)
            share = weights[env] / sum(weights.values())
            env_id = await client.register(env, group_size=size, min_batch_allocation=share)
            registered.append(env)

            async def work() -> None:
                while True:
                    await anyio.sleep(0.25 if env == slow else 0.0)
                    await client.post(next(numbers), n=size, env_id=env_id)

            async with anyio.create_task_group() as workers:
                for _ in range(WORKERS):
                    workers.start_soon(work)

    async with world.running(), anyio.create_task_group() as tasks:
        for env in weights:
            tasks.start_soon(environment, env)
        with anyio.fail_after(240):
            while len(registered) < len(weights):  # noqa: ASYNC110 - the gateway is another process
                await anyio.sleep(0.02)
            world.trains.set()
            while len(world.batches) < BATCHES:  # noqa: ASYNC110
                await anyio.sleep(0.05)
        outcomes = await world.outcomes()
        tasks.cancel_scope.cancel()
    assert world.worst <= 3 * batch_size
    trained = Counter[str]()
    for batch in world.batches[FULL_AFTER:BATCHES]:
        # The last batch that may have a group takes it; where nothing that waits fits beside it, it is not full.
        last_for_one = any(ref.last_step + MAX_STALENESS <= batch.number for ref in batch.groups)
        missing = batch_size - batch.sequences
        assert missing == 0 or (last_for_one and missing < largest), "groups waited, and it left without them"
        trained.update({env: sum(ref.sequences for ref in batch.groups if ref.env == env) for env in weights})
    for env, weight in weights.items():
        assert trained[env] / trained.total() == pytest.approx(weight / sum(weights.values()), abs=0.05), trained
    assert outcomes["stale"] <= 2 * WORKERS * len(weights), "what came before a lease was granted for it"
    assert "min_batch_allocation" not in world.log.read_text(), "the mix gives what they ask for"
