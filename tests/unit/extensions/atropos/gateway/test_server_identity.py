"""A group has the tokenizer hash that the policy's server was observed to have, and waits while that is another."""

import msgspec
import pytest

from lachesis.pipeline.errors import AccessError, InfrastructureError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.identity import ObservedServer
from lachesis.schemas import keys

pytestmark = pytest.mark.outside


class Server:
    """What is observed of the policy's server; an error is raised."""

    def __init__(self):
        self.found = ObservedServer(model="policy", engine="lachesis", tokenizer_hash="tok")

    async def observe(self, client, probe, *, version=False):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
async def server(monkeypatch, world):
    made = Server()

    async def observe(client, probe, *, version=False):
        return await made.observe(client, probe, version=version)

    monkeypatch.setattr(InferenceClient, "observe", observe)
    monkeypatch.setattr("lachesis.pipeline.extensions.atropos.gateway.server_identity._RETRY_S", 0.01)
    await world.bus.put(keys.inference("policy"), b"http://127.0.0.1:9")
    return made


def notice(world):
    return next((one.what for one in world.service.vitals.notices() if one.key == "policy's server"), None)


async def test_what_is_stored_is_what_was_observed(world, make_scored, server):
    server.found = msgspec.structs.replace(server.found, tokenizer_hash="tok+template")
    async with world.gateway() as http:
        assert (await http.post("/scored_data", json=make_scored())).status_code == 200
    (group,) = await world.groups()
    assert group.tokenizer_hash == "tok+template"


async def test_nothing_is_taken_while_the_server_has_another_tokenizer_and_all_is_afterwards(
    world, make_scored, server
):
    right, server.found = server.found, msgspec.structs.replace(server.found, tokenizer_hash="other")
    async with world.gateway(world.config(hold_s=0.3)) as http:
        answer = await http.post("/scored_data", json=make_scored())
        assert answer.status_code == 503
        assert "the policy's server is not the run's" in answer.json()["detail"][0]["msg"]
        server.found = InfrastructureError("away")
        assert (await http.post("/scored_data", json=make_scored())).status_code == 503, "nothing better was seen since"
        assert await world.groups() == []
        server.found = right
        assert (await http.post("/scored_data", json=make_scored())).status_code == 200
        server.found = AccessError("its routes are the run's alone")
        assert (await http.post("/scored_data", json=make_scored(seed=2))).status_code == 200, "it was seen to be right"
    assert [group.tokenizer_hash for group in await world.groups()] == ["tok", "tok"]
