"""Three environments post flat out, more than the run can train on: batches hold the shares of `batching.mix`."""

from collections import Counter
from itertools import count
from pathlib import Path

import anyio
import httpx
import pytest
from integration.gateway.test_gateway import Client
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

RUN = "g"
GROUP_SIZE, WORKERS, STEPS = 4, 12, 24
WEIGHTS = {"words": 1, "sums": 2, "code": 4}
BATCH_SIZE = GROUP_SIZE * sum(WEIGHTS.values())
FULL_AFTER = 8
"""Batches made of what there was before all three posted."""


@pytest.mark.parametrize("slow", ["words", "code"])
async def test_environments_that_post_flat_out_have_their_shares_of_the_batches(
    slow: str, nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    posting = Counter[str]()

    async def all_post() -> None:
        """Wait until each client waits for an answer: then each environment has more to give than is taken."""
        while any(posting[env] < WORKERS for env in WEIGHTS):  # noqa: ASYNC110 - the gateway is another process
            await anyio.sleep(0.02)

    mix = "{ words = 1.0, sums = 2.0, code = 4.0 }"
    world = World(
        nats_bus, nats_server, tmp_path,
        batch_size=BATCH_SIZE, mix=mix, environments=list(WEIGHTS), before_step=all_post,
    )  # fmt: skip
    world.trains.set()
    numbers = count()
    limits = httpx.Limits(max_connections=None)
    async with (
        world.running(),
        httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False, limits=limits) as http,
    ):

        async def work(client: Client, env: str, env_id: int) -> None:
            while True:
                if env == slow:
                    await anyio.sleep(0.25)  # it generates
                posting[env] += 1
                await client.post(next(numbers), n=GROUP_SIZE, env_id=env_id)
                posting[env] -= 1

        async with anyio.create_task_group() as tasks:
            for env, weight in WEIGHTS.items():
                client = Client(http)
                env_id = await client.register(env, min_batch_allocation=weight / sum(WEIGHTS.values()))
                for _ in range(WORKERS):
                    tasks.start_soon(work, client, env, env_id)
            with anyio.fail_after(240):
                while len(world.batches) < STEPS:  # noqa: ASYNC110 - another process trains on
                    await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        assert world.worst <= 3 * BATCH_SIZE
    trained = Counter[str]()
    for batch in world.batches[FULL_AFTER:]:
        trained.update({env: sum(ref.sequences for ref in batch.groups if ref.env == env) for env in WEIGHTS})
    for env, weight in WEIGHTS.items():
        assert trained[env] / trained.total() == pytest.approx(weight / sum(WEIGHTS.values()), abs=0.1), trained
    assert "min_batch_allocation" not in world.log.read_text(), "the mix gives what they ask for"
