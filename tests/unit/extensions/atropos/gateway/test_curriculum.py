"""GET /curriculum: weights by name, cheap to poll; and the names that groups come with."""

import json
import re

import pytest

from lachesis.schemas import keys
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.control import CurriculumSnapshot

pytestmark = pytest.mark.outside


async def publish(world, weights, unknown, version, env="words"):
    snapshot = CurriculumSnapshot(
        run="r", env=env, revision="live", id=version, observed=1, strategy="irt", names=list(weights),
        weights=as_bytes([*weights.values(), unknown], "float32"),
    )  # fmt: skip
    await world.bus.put(keys.curriculum("live", env), encode(snapshot))


async def weights_of(http, expected, **params):
    """Ask until the gateway has heard of version `expected`; it watches the bucket."""
    while True:
        answer = await http.get("/curriculum", params=params)
        assert answer.status_code == 200, answer.text
        if answer.json()["version"] == expected:
            return answer


async def test_weights_come_by_name_and_an_unchanged_version_costs_no_body(world):
    async with world.gateway() as http:
        early = await http.get("/curriculum")
        assert early.json() == {"env": "words", "strategy": "irt", "version": None, "unknown": 1.0, "weights": {}}
        again = await http.get("/curriculum", headers={"If-None-Match": early.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        await publish(world, {"a": 0.5, "größe": 1.25}, 1.25, "7-ab")
        answer = await weights_of(http, "7-ab")
        assert answer.json() == {
            "env": "words", "strategy": "irt", "version": "7-ab", "unknown": 1.25, "weights": {"a": 0.5, "größe": 1.25},
        }  # fmt: skip
        tag = answer.headers["ETag"]
        for known in (tag, tag.removeprefix("W/"), f'"other", {tag}'):
            again = await http.get("/curriculum", headers={"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["ETag"]) == (304, b"", tag)
        assert (await http.get("/curriculum", headers={"If-None-Match": '"other"'})).status_code == 200
        await publish(world, {"a": 2.0}, 1.0, "8-cd")
        assert (await weights_of(http, "8-cd")).json()["weights"] == {"a": 2.0}
        assert (await http.get("/curriculum", headers={"If-None-Match": tag})).status_code == 200


async def test_an_unreadable_snapshot_is_left_out(world):
    async with world.gateway() as http:
        await publish(world, {"a": 1.0}, 1.0, "1-a")
        await weights_of(http, "1-a")
        await world.bus.put(keys.curriculum("live", "words"), b"\xc1")
        short = CurriculumSnapshot(
            run="r", env="words", revision="live", id="2-b", observed=1, strategy="irt", names=["a", "b"],
            weights=as_bytes([1.0, 1.0], "float32"),
        )  # fmt: skip
        await world.bus.put(keys.curriculum("live", "words"), encode(short))
        await publish(world, {"a": 3.0}, 1.0, "3-c")
        assert (await weights_of(http, "3-c")).json()["weights"] == {"a": 3.0}


async def test_an_environment_is_found_by_its_id_or_its_name(world):
    async with world.gateway(world.config("words", "sums")) as http:
        number = await world.registered(http, "sums")
        await publish(world, {"x": 1.0}, 1.0, "1-a", env="sums")
        assert (await weights_of(http, "1-a", env="sums")).json()["env"] == "sums"
        assert (await http.get("/curriculum", params={"env_id": number})).json()["env"] == "sums"
        assert (await http.get("/curriculum", params={"env": "words"})).json()["version"] is None
        assert (await http.get("/curriculum", params={"env_id": 77})).status_code == 404
        for params in ({}, {"env": "other"}, {"env_id": "x"}, {"env_id": "9" * 5000}, {"env_id": "-1"}):
            refused = await http.get("/curriculum", params=params)
            assert refused.status_code == 422
            assert "env" in refused.json()["detail"][0]["msg"]


async def test_the_token_rule_is_that_of_all_routes(world, tmp_path):
    file = tmp_path / "token"
    file.write_text("secret")
    async with world.gateway(world.config(needs_token=True, token_file=str(file))) as http:
        assert (await http.get("/curriculum")).status_code == 401
        assert (await http.get("/curriculum", auth=("any", "secret"))).status_code == 200
        strange = {"Authorization": "Bearer secret", "Origin": "http://page.example"}
        assert (await http.get("/curriculum", headers=strange)).status_code == 403


async def test_a_group_bears_the_name_that_its_client_gives_its_item(world, make_scored):
    async with world.gateway() as http:
        named = make_scored(seed=1, group_overrides={"curriculum_item": "gsm8k-17 größe"})
        for data in (named, make_scored(seed=2, group_overrides={"curriculum_item": None}), make_scored(seed=3)):
            assert (await http.post("/scored_data", json=data)).status_code == 200
        first, *others = await world.groups()
        assert first.item == "gsm8k-17 größe"
        assert "item" not in first.metadata["gateway"]["assumed"]
        for group in others:
            assert group.item.startswith("prompt-")
            assert "item" in group.metadata["gateway"]["assumed"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (17, "is no text"),
        (["a"], "is no text"),
        ("", "is empty"),
        ("a\x1b[2J", "cannot be printed"),
        ("a\n", "cannot be printed"),
        ("\ud800", "invalid unicode|surrogate|cannot be printed"),
        ("ö" * 65, "has 130 bytes, where 128 are allowed"),
        ("prompt-1", "begins with 'prompt-'"),
    ],
)
async def test_a_bad_name_is_refused_with_its_reason(world, make_scored, name, reason):
    async with world.gateway() as http:
        body = json.dumps(make_scored(group_overrides={"curriculum_item": name}))
        answer = await http.post("/scored_data", content=body)
        assert answer.status_code == 422
        assert re.search(reason, answer.json()["detail"][0]["msg"])
        assert await world.groups() == []
