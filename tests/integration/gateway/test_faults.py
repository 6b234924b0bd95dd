"""The faults of the original API, one test each: what it did, and that the gateway does not.

The eighth, which is about CPU time, has its test among the unit tests of trainers.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from integration.gateway.test_gateway import Client, scored
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

RUN = "g"
STOCK = {
    "wandb_group": "", "wandb_project": "", "batch_size": 8, "max_token_len": 64, "starting_step": 0,
    "checkpoint_dir": "c", "save_checkpoint_interval": 7, "num_steps": 20,
}  # fmt: skip


class Trainer:
    """Asks as trainers do. `user` names it."""

    def __init__(self, http: httpx.AsyncClient, user: str = "lachesis") -> None:
        self.http = http
        self.auth = (user, "none")

    async def register(self, **changes: Any) -> None:
        answer = await self.http.post("/register", json=STOCK | changes, auth=self.auth)
        assert answer.status_code == 200, answer.text

    async def ask(self) -> list[int] | None:
        """Return the numbers of the groups of the batch that is handed out, None if none is."""
        data = (await self.http.get("/batch", auth=self.auth)).json()
        assert "status" not in data, data
        return data["batch"] and [group["tokens"][0][1] - 1000 for group in data["batch"]]

    async def wait(self) -> list[int]:
        """Ask until there is a batch."""
        with anyio.fail_after(60):
            while (batch := await self.ask()) is None:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        return batch


@pytest.fixture
async def world(nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(nats_bus, nats_server, tmp_path, mode="observe")
    async with made.running():
        yield made


@pytest.fixture
async def http(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False) as made:
        yield made


@pytest.mark.slow
async def test_fault_1_a_kill_loses_no_group_and_nobody_has_to_register_again(
    world: World, http: httpx.AsyncClient
) -> None:
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    await client.post(0, env_id=words)
    world.kill()
    await world.start()
    await client.post(1, env_id=words)
    assert sorted(await trainer.wait()) == [0, 1]
    world.kill()
    await world.start()
    assert await trainer.ask() is None  # as the stock trainer hears it once it has collected
    assert await trainer.ask() is None
    assert (await http.get("/status")).status_code == 200


async def test_fault_2_a_group_before_the_trainer_registers_breaks_nothing(
    world: World, http: httpx.AsyncClient
) -> None:
    early = await http.post("/scored_data", json=scored(0))
    assert early.status_code in (422, 503)
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    for number in (0, 1):
        await client.post(number, env_id=words)
    assert sorted(await trainer.wait()) == [0, 1]


async def test_fault_3_a_score_that_is_no_number_is_refused_and_costs_no_batch(
    world: World, http: httpx.AsyncClient
) -> None:
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    await client.post(0, env_id=words)
    nan = '{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[NaN],"inference_logprobs":[[1.0,-1.0]]}'
    assert (await http.post("/scored_data", content=nan)).status_code == 422
    await client.post(1, env_id=words)
    assert sorted(await trainer.wait()) == [0, 1]


async def test_fault_4_no_size_of_a_group_blocks_the_batches(world: World, http: httpx.AsyncClient) -> None:
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    assert (await http.post("/scored_data", json=scored(9, n=16, env_id=words))).status_code == 422
    for number, size in enumerate((3, 5)):
        await client.post(number, n=size, env_id=words)
    assert (await http.post("/disconnect-env", json={"env_id": words})).json() == {"status": "success"}
    assert sorted(await trainer.wait()) == [0, 1]


async def test_fault_5_an_environment_without_data_holds_up_no_batch(world: World, http: httpx.AsyncClient) -> None:
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    await client.register("sums", min_batch_allocation=0.5)
    for number in (0, 1):
        await client.post(number, env_id=words)
    assert sorted(await trainer.wait()) == [0, 1]


async def test_fault_6_what_waits_is_bounded_the_oldest_comes_first_and_steps_are_those_trained(
    world: World, http: httpx.AsyncClient
) -> None:
    trainer, client = Trainer(http), Client(http)
    await trainer.register()
    words = await client.register("words")
    async with anyio.create_task_group() as tasks:
        for number in range(6):  # one after the other, so that which is the oldest is known
            await client.post(number, env_id=words)
        tasks.start_soon(lambda: client.post(6, env_id=words))  # held: three batches are all that may wait
        with anyio.fail_after(60):
            while world.worst < 24:  # noqa: ASYNC110 - it is what the governor counts
                await anyio.sleep(0.02)
        assert (await http.get("/status")).json()["current_step"] == 0, "batches are formed, none is trained"
        assert 6 not in client.answered
        assert sorted(await trainer.wait()) == [0, 1]
        assert await trainer.ask() is None
        assert (await http.get("/status")).json()["current_step"] == 0, "it is handed out, and not trained yet"
        assert sorted(await trainer.wait()) == [2, 3]
        with anyio.fail_after(60):
            while (await http.get("/status")).json()["current_step"] != 1:  # noqa: ASYNC110
                await anyio.sleep(0.02)
    assert 6 in client.answered
    assert world.worst <= 24


async def test_fault_7_registering_again_counts_nothing_is_stolen_and_a_lost_reply_comes_again(
    world: World, http: httpx.AsyncClient
) -> None:
    first, second, client = Trainer(http, "main.first"), Trainer(http, "main.second"), Client(http)
    await first.register()
    await second.register(num_steps=30, save_checkpoint_interval=9)
    words = await client.register("words")
    for number in range(4):
        await client.post(number, env_id=words)
    batches = [await first.wait(), await second.wait()]
    assert sorted(batches[0] + batches[1]) == [0, 1, 2, 3]
    await first.register()  # it died with the reply, and its next life asks
    assert await first.ask() == batches[0]
    answer = await http.get("/batch", headers={"Origin": "http://a.page"})
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers
