"""The gateway as a process on a real server, governor and batcher behind it: it holds, dies, loses nothing."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.schemas.rollout import RolloutGroup

RUN = "g"


@pytest.fixture
async def world(nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(nats_bus, nats_server, tmp_path)
    async with made.running():
        yield made


@pytest.fixture
async def client(world: World) -> AsyncIterator["Client"]:
    async with httpx.AsyncClient(base_url=world.url, timeout=150, trust_env=False) as http:
        yield Client(http)


def scored(number: int, *, n: int = 4, env_id: int | None = None) -> dict[str, Any]:
    rows = [[2, 1000 + number, 10 + i, 20 + i] for i in range(n)]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": [float(i % 2) for i in range(n)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * n,
        "env_id": env_id,
        "overrides": None,
    }


def number_of(group: RolloutGroup) -> int:
    return int(next(iter(group.sequences)).tokens[1]) - 1000


class Client:
    """Posts as an environment does, but for ever: until it is answered 200."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.answered: list[int] = []
        self.failures = 0

    async def register(self, name: str, **changes: Any) -> int:
        body = {"max_token_length": 64, "desired_name": name, "weight": 1.0, "group_size": 4, **changes}
        while (answer := (await self.http.post("/register-env", json=body)).json())["status"] != "success":
            assert answer == {"status": "wait for trainer to start"}
            await anyio.sleep(0.05)
        return int(answer["env_id"])

    async def post(self, number: int, **changes: Any) -> None:
        while True:
            try:
                answer = await self.http.post("/scored_data", json=scored(number, **changes))
            except httpx.HTTPError:
                self.failures += 1
                await anyio.sleep(0.05)
                continue
            assert answer.status_code in (200, 503), answer.text
            if answer.status_code == 200:
                self.answered.append(number)
                return
            await anyio.sleep(0.05)


async def until(condition: Any, seconds: float = 90) -> None:
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for are other processes
            await anyio.sleep(0.02)


async def test_groups_are_held_while_the_trainer_stands_and_none_is_lost_when_it_goes(
    world: World, client: Client
) -> None:
    words = await client.register("words")
    # reserves half of each batch, has nothing to send and never disconnects: no environment waits for it
    await client.register("sums", min_batch_allocation=0.5)
    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(lambda number=number: client.post(number, env_id=words))
        await until(lambda: world.worst == 24)  # three batches, all that max_staleness allows
        await anyio.sleep(1.0)
        assert len(await world.groups()) == 6  # 14 are held: their generation is done, and nothing of it is lost
        # those stored once there was no room left are answered when there is room for the next
        assert 0 < len(client.answered) <= 6
        queue = (await client.http.request("GET", "/status-env", json={"env_id": words})).json()["queue_size"]
        assert queue * 4 >= 3 * 8  # so an environment throttles itself
        world.trains.set()
        with anyio.fail_after(60):
            while len(groups := await world.groups()) < 20:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        assert sorted(map(number_of, groups)) == list(range(20)), "each is there once"
        # the last answers wait for room for groups that this environment does not make
        tasks.cancel_scope.cancel()
    with anyio.fail_after(60):
        while (await world.outcomes()).total() < 20:  # noqa: ASYNC110
            await anyio.sleep(0.1)
    # what was held is as old as it was when it came: an environment that ignores the queue makes groups of no use
    assert (await world.outcomes()) == {"batched": 6, "stale": 14}
    assert [batch.sequences for batch in world.batches] == [8, 8, 8]
    assert world.worst == 24


@pytest.mark.slow
async def test_kills_of_the_gateway_lose_nothing_and_store_nothing_twice(world: World, client: Client) -> None:
    world.trains.set()
    words = await client.register("words")
    small = await client.register("sums", group_size=8)

    async def environment(numbers: range, **changes: Any) -> None:
        for number in numbers:
            await client.post(number, **changes)

    async with anyio.create_task_group() as tasks:
        for worker in range(4):
            tasks.start_soon(lambda worker=worker: environment(range(worker * 20, worker * 20 + 20), env_id=words))
        tasks.start_soon(lambda: environment(range(100, 116), env_id=small, n=4))  # two make up a group
        for quarter in (20, 45, 70):
            await until(lambda quarter=quarter: len(client.answered) >= quarter)
            world.kill()
            await world.start()
    assert client.failures > 0, "no kill was noticed"
    assert len(client.answered) == 96
    # half a group that came again after a kill has no partner left: what waits is published when its environment leaves
    assert (await client.http.post("/disconnect-env", json={"env_id": small})).json() == {"status": "success"}
    groups = await world.groups()
    assert sorted(map(number_of, groups)) == sorted(client.answered), "each is there once"
    with anyio.fail_after(60):
        while (await world.outcomes()).total() < 95:  # noqa: ASYNC110 - half a batch may be left
            await anyio.sleep(0.1)
    outcomes = await world.outcomes()
    assert set(outcomes) <= {"batched", "stale"}, outcomes


async def test_a_group_that_no_batch_can_hold_is_refused_and_blocks_nobody(world: World, client: Client) -> None:
    world.trains.set()
    words = await client.register("words")
    answer = await client.http.post("/scored_data", json=scored(0, n=16, env_id=words))
    assert answer.status_code == 422
    nan = '{"tokens":[[1,2]],"masks":[[-100,2]],"scores":[NaN],"inference_logprobs":[[1.0,-1.0]]}'
    assert (await client.http.post("/scored_data", content=nan)).status_code == 422
    for number, size in enumerate((3, 5, 3, 5)):  # none is a group of four: 3 waits, 5 can never, so it goes on
        await client.post(number, n=size, env_id=words)
    assert (await client.http.post("/disconnect-env", json={"env_id": words})).json() == {"status": "success"}
    await until(lambda: sum(batch.sequences for batch in world.batches) == 16)
