"""A run's history with the worst that each key may store in it: it is reproduced, replayed and shown as a page."""

from collections.abc import AsyncIterator

import pytest
from integration.archive.world import RUN, World, a_group, a_world
from integration.security.own_keys import places, worst
from integration.web.test_web import page

from lachesis.pipeline.access import OBSERVER, OPERATOR, Scope
from lachesis.pipeline.extension import access_of

GROUPS = 6
REPEATED = 2
"""The newest rollout, stored again by each of two keys."""
ACCESS = access_of(
    Scope(run=RUN, revision="live", trainer="main", environments=("sums", "words"), foreign=("sums", "words"))
)
ROUTES = (
    "run", "series", "alerts", "groups", "groups?limit=2", "groups?text=what", "groups?state=trained",
    "groups?highest=score", f"groups/{1:032x}", f"groups/{'f' * 32}", "revisions",
    "comparison?a=live&b=again",
)  # fmt: skip


@pytest.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path_factory.mktemp("hostile")) as made:
        await made.judge({await made.store(one): one for one in map(a_group, range(1, GROUPS + 1))})
        for identity in sorted(set(ACCESS) - {OBSERVER, OPERATOR}):
            for place in places(ACCESS[identity]):
                for _, subject, data, headers in await worst(made.bus, place):
                    await made.bus.client.publish(subject, data, headers=headers or None)
        await made.bus.client.flush(60)
        yield made


@pytest.fixture(scope="module")
async def replayed(world: World) -> tuple[int, str, str]:
    """Exit status and output of a replay as the revision "again"."""
    return await world.lachesis("replay", "--revision", "again")


def check_said(said: str, *places: str) -> None:
    """Each place is named, with what was passed over there, and nothing fails."""
    assert "Traceback" not in said, said
    for place in places:
        assert place in said, said


@pytest.mark.slow
async def test_its_batches_are_compared_though_the_batcher_wrote_more(world: World) -> None:
    code, out, err = await world.lachesis("reproduce", "--batches-only")
    assert code == 1, "this ledger has other advantages than the streams"
    assert "1 entries follow one another" in out
    assert "advantages is" in out
    check_said(out + err, *(f"rl.ledger.{RUN}.main: the message at sequence {seq} of LEDGER" for seq in (2, 3, 4, 5)))


@pytest.mark.slow
async def test_what_can_be_read_of_it_is_replayed(replayed: tuple[int, str, str]) -> None:
    code, out, err = replayed
    assert code == 0, err
    assert f"{GROUPS + REPEATED} of {GROUPS + REPEATED} groups" in out
    check_said(err, *(f"rollouts of {env} passed over" for env in ("sums", "words")))


@pytest.mark.slow
@pytest.mark.usefixtures("replayed")
async def test_the_page_shows_it(world: World) -> None:
    async with page(world) as (client, _):
        for route in ROUTES:
            answer = await client.get(f"/api/{route}")
            assert answer.status_code == (404 if "fff" in route else 200), (route, answer.text)
            assert "Traceback" not in answer.text
        groups = (await client.get("/api/groups")).json()["groups"]
        assert [row["seq"] for row in groups[-GROUPS:]] == list(range(GROUPS, 0, -1))
