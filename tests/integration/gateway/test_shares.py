"""Two environments of different speed ask for minima: batches hold the shares of `batching.mix`."""

from collections import Counter
from functools import partial
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
BATCH_SIZE, GROUP_SIZE, WORKERS = 32, 4, 12
GENERATES_S = {"words": 0.0, "sums": 0.25}
ASKED = {"words": 0.25, "sums": 0.75}


async def test_the_slower_environment_has_the_larger_share_that_it_asked_for(
    nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    mix = "{ words = 1.0, sums = 3.0 }"
    world = World(
        nats_bus, nats_server, tmp_path, batch_size=BATCH_SIZE, mix=mix, before_step=partial(anyio.sleep, 1.0)
    )
    world.trains.set()
    numbers = count()
    async with world.running(), httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False) as http:

        async def work(client: Client, env: str, env_id: int) -> None:
            while True:
                await anyio.sleep(GENERATES_S[env])
                await client.post(next(numbers), n=GROUP_SIZE, env_id=env_id)

        async with anyio.create_task_group() as tasks:
            for env, share in ASKED.items():
                client = Client(http)
                env_id = await client.register(env, min_batch_allocation=share)
                for _ in range(WORKERS):
                    tasks.start_soon(work, client, env, env_id)
            with anyio.fail_after(240):
                while len(world.batches) < 15:  # noqa: ASYNC110 - another process trains on
                    await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        assert world.worst <= 3 * BATCH_SIZE
    trained = Counter[str]()
    for batch in world.batches[4:]:  # what was there before the second one had begun is trained by then
        assert batch.sequences == BATCH_SIZE
        trained.update({env: sum(ref.sequences for ref in batch.groups if ref.env == env) for env in ASKED})
    assert trained["sums"] / trained.total() == pytest.approx(ASKED["sums"], abs=0.05)
    assert trained["words"] > 0
    assert "min_batch_allocation" not in world.log.read_text(), "the mix gives what they ask for"
