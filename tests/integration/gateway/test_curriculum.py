"""Items that clients of the gateway name come back as weights, on a real server and across kills of the gateway."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from integration.gateway.world import World

from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.jetstream import NatsBus

RUN = "g"


@pytest.fixture
async def world(nats_bus: NatsBus, nats_server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[World]:
    made = World(nats_bus, nats_server, tmp_path)
    made.trains.set()
    async with made.running():
        yield made


def scored(number: int, item: str, scores: list[float]) -> dict[str, Any]:
    rows = [[2, 1000 + number, 10 + i, 20 + i] for i in range(len(scores))]
    return {
        "tokens": rows,
        "masks": [[-100, -100, *row[2:]] for row in rows],
        "scores": scores,
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * len(rows),
        "group_overrides": {"curriculum_item": item},
    }


async def weights(http: httpx.AsyncClient, *names: str) -> httpx.Response:
    """Ask until all these items are known."""
    with anyio.fail_after(60):
        while True:
            answer = await http.get("/curriculum", params={"env": "words"})
            if set(names) <= set(answer.json()["weights"]):
                return answer
            await anyio.sleep(0.05)


@pytest.mark.slow
async def test_what_clients_name_comes_back_as_weights_and_survives_a_kill(world: World) -> None:
    async with httpx.AsyncClient(base_url=world.url, timeout=60, trust_env=False) as http:
        body = {"max_token_length": 64, "desired_name": "words", "weight": 1.0, "group_size": 4}
        while (answer := (await http.post("/register-env", json=body)).json())["status"] != "success":
            assert answer["status"] == "wait for trainer to start"
            await anyio.sleep(0.05)
        number = answer["env_id"]

        async def post(n: int, item: str, scores: list[float]) -> None:
            reply = await http.post("/scored_data", json=scored(n, item, scores) | {"env_id": number})
            assert reply.json() == {"status": "received"}

        for n in range(6):
            await post(2 * n, "half", [0.0, 1.0, 0.0, 1.0])
            await post(2 * n + 1, "solved", [1.0] * 4)
        await post(100, "last", [0.0, 1.0, 1.0, 1.0])
        found = await weights(http, "half", "solved", "last")
        assert found.json()["strategy"] == "irt"
        assert found.json()["weights"]["half"] > found.json()["unknown"] > found.json()["weights"]["solved"]
        world.kill()
        await world.start()
        again = await weights(http, "half", "solved", "last")
        assert again.content == found.content
        cheap = await http.get(
            "/curriculum", params={"env_id": number}, headers={"If-None-Match": found.headers["ETag"]}
        )
        assert (cheap.status_code, cheap.content) == (304, b"")
        other = (await http.get("/curriculum", params={"env": "sums"})).json()
        assert (other["unknown"], other["weights"]) == (1.0, {})
    assert {group.item for group in await world.groups()} == {"half", "solved", "last"}
