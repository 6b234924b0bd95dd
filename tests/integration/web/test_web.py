"""`lachesis web` as a browser meets it: what it answers and refuses, and the page in a real browser."""

import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import msgspec
import numpy as np
import pytest
from integration.archive.world import RUN, World, a_group, a_world

from lachesis.pipeline.runtime.service import Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.columns import as_bytes
from lachesis.schemas.ledger import TrainReport
from lachesis.schemas.packing import pack_mask
from lachesis.schemas.rollout import Message, RolloutGroup
from lachesis.services.observe.groups import MAX_SAMPLES

pytestmark = pytest.mark.hostile

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=1</script>\x1b[31m\u202eFORGED'
REPORT = TrainReport(
    run=RUN, trainer="main", lineage="l", term="t", step=1, ledger_index=0, chain="c", next_batch=1,
    policy_version="1-a-b", checkpoint="c", written_ns=1,
)  # fmt: skip


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[World]:
    async with a_world(tmp_path) as made:
        groups = [*(a_group(n) for n in range(1, 5)), an_agents_group(5)]
        texts = [[Message(role="user", content=HOSTILE), Message(role="assistant", content=HOSTILE)]] * 4
        groups.append(a_group(6).replace(item=HOSTILE, messages=texts))
        stored = {await made.store(one): one for one in groups}
        await made.judge(stored)
        (tmp_path / "runs" / RUN / "metrics.jsonl").write_text(
            "".join(
                f'{{"train/step": {n}.0, "reward/mean": 0.{n}, "reward/sums/rater/length": 0.{n}}}\n'
                for n in range(1, 6)
            )
        )
        yield made


def an_agents_group(n: int) -> RolloutGroup:
    """Return group `n` with two samples of two sequences, each of two calls, whose turns have rewards."""
    group = a_group(n)
    masked = [place for sequence in range(4) for place in (8 * sequence, 8 * sequence + 4)]
    mask = np.ones(32, bool)
    mask[masked] = False
    assert group.sequences.logprobs is not None
    logprobs = np.where(mask, np.frombuffer(group.sequences.logprobs, np.float32), 0).astype(np.float32)
    sequences = msgspec.structs.replace(
        group.sequences,
        loss_mask=pack_mask(mask),
        logprobs=as_bytes(logprobs, "float32"),
        sample_index=[0, 0, 1, 1],
        rewards={"environment": [0.0, 1.0]},
        turn_rewards=[[0.0, 0.25, 0.5, 1.0], [0.0, 0.0, 0.0, -1.0]],
        turn_order=[[1, 3, 0, 2], [0, 1, 2, 3]],
    )
    return group.replace(sequences=sequences, messages=group.messages[:2])


@asynccontextmanager
async def page(world: World, *options: str) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """Yield a client of the page, and the address that was printed."""
    process = world.start("web", *options)
    try:
        assert process.stdout is not None
        with anyio.fail_after(60):
            url = (await anyio.to_thread.run_sync(process.stdout.readline)).decode().strip()
        async with httpx.AsyncClient(base_url=url.partition("?")[0], timeout=60) as client:
            await client.get(url)  # the token becomes a cookie
            yield client, url
    finally:
        process.terminate()
        code, _, err = await world.ended(process)
    assert code == 0, err
    assert "Traceback" not in err


@pytest.mark.slow
async def test_what_is_asked_of_the_history_is_answered(world: World) -> None:
    async with page(world) as (client, _):
        run = (await client.get("/api/run")).json()
        assert (run["run"], run["environments"]) == (RUN, ["sums", "words"])
        assert run["state"] == "silent", "its server answers, and no service of it was heard"
        (notice,) = run["notices"]
        assert "services are silent" in notice["text"]
        assert notice["stops"]
        charts = (await client.get("/api/series")).json()["charts"]
        reward = next(chart for chart in charts if chart["name"] == "reward")
        assert [value for line in reward["lines"] for _, value in line["points"]] == [0.1, 0.2, 0.3, 0.4, 0.5]
        raters = next(chart for chart in charts if chart["name"] == "ratings/sums")
        assert [(line["name"], line["points"][-1]) for line in raters["lines"]] == [("length", [5.0, 0.5])]
        first = (await client.get("/api/groups", params={"limit": 4})).json()
        rest = (await client.get("/api/groups", params={"before": first["before"]})).json()
        assert [row["seq"] for row in first["groups"] + rest["groups"]] == [6, 5, 4, 3, 2, 1]
        assert rest["before"] is None
        found = (await client.get("/api/groups", params={"text": "what is 3?"})).json()["groups"]
        assert [row["item"] for row in found] == ["3"]
        group = (await client.get(f"/api/groups/{found[0]['group']}")).json()
        assert len(group["tokens"]) == 4
        hostile = (await client.get("/api/groups", params={"item": "FORGED"})).json()["groups"]
        assert [row["item"] for row in hostile] == [HOSTILE]


@pytest.mark.slow
async def test_the_head_says_how_a_run_stands_that_no_up_of_this_machine_started(world: World) -> None:
    service = Service(world.bus, "governor", RUN)
    service.vitals.metrics |= {"flow/lost_seconds": 4.5, "flow/lost_groups": 2}

    async def beat(beats: int = 1 << 30) -> None:
        for number in range(beats):
            await service.heartbeat()
            await anyio.sleep(0.2 if number else 0)

    async with page(world) as (client, _), anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        run = (await client.get("/api/run")).json()
        assert run["state"] == "running"
        lost = {"seconds": 4.5, "groups": 2, "resumed_seconds": 0.0, "resumed_groups": 0}
        assert run["lost_generation"] == lost, "of the newest heartbeat of the process alone"
        tasks.cancel_scope.cancel()
    subject = subjects.state(RUN, "trainer", subjects.LIVE, "main")
    await world.bus.publish(subject, encode(REPORT), msg_id="report")
    async with page(world, "--set", "training.steps=1") as (client, _):
        run = (await client.get("/api/run")).json()
        assert (run["state"], run["goes_on"]) == ("finished", False)
        groups = (await client.get("/api/groups")).json()["groups"]
        assert [row["state"] for row in groups] == [*["left over"] * 4, "stale", "trained"]


@pytest.mark.slow
async def test_groups_are_found_and_ordered_by_a_single_rater(world: World) -> None:
    async with page(world) as (client, _):
        assert (await client.get("/api/run")).json()["raters"] == ["length"]
        everything = (await client.get("/api/groups")).json()["groups"]
        assert [row["ratings"] for row in everything] == [{"length": 0.5}] * 6
        for rating, found in (("length=0.5:", 6), ("length=0.6:", 0), ("other=0:", 0)):
            rows = (await client.get("/api/groups", params={"rating": rating})).json()["groups"]
            assert len(rows) == found, rating
        first = (await client.get("/api/groups", params={"lowest": "score", "limit": 2})).json()
        assert ([row["seq"] for row in first["groups"]], first["before"]) == ([1, 2], None)
        first = (await client.get("/api/groups", params={"highest": "length", "limit": 2})).json()
        assert [row["seq"] for row in first["groups"]] == [6, 5], "of equal ones the newest come first"
        assert (await client.get("/api/groups", params={"highest": "nothing"})).json()["groups"] == []
        for wrong in ({"rating": "length"}, {"rating": "length=high"}, {"lowest": "length", "highest": "length"}):
            assert (await client.get("/api/groups", params=wrong)).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("named", [["--run", "nope"], ["--run", "nope", "--port", "0"]])
async def test_no_page_is_served_of_a_run_that_there_is_not(world: World, named: list[str]) -> None:
    said = await world.refusal("web", *named)
    assert "there is no run nope" in said
    assert RUN in said, "the runs that there are"


@pytest.mark.slow
async def test_two_revisions_are_compared_as_the_command_compares_them(world: World) -> None:
    async with page(world) as (client, _):
        assert (await client.get("/api/revisions")).json() == {"revisions": ["live"]}
        missing = await client.get("/api/comparison", params={"a": "live", "b": "again"})
        assert (missing.status_code, "there are live" in missing.json()["error"]) == (404, True)
    code, _, err = await world.lachesis("replay", "--revision", "again")
    assert code == 0, err
    async with page(world) as (client, _):
        assert (await client.get("/api/revisions")).json() == {"revisions": ["live", "again"]}
        answer = await client.get("/api/comparison", params={"a": "live", "b": "again"})
        found = answer.json()
        assert answer.status_code == 200, found
    printed = await world.json("compare", "live", "again")
    cells = {row[0]: row[1] for row in found["tables"][0]["rows"]}
    assert cells == {name: "-" if value is None else f"{value:.4g}" for name, value in printed["metrics"].items()}
    assert [one["group"] for one in found["disputed"][:5]] == [one["group"] for one in printed["disputed"]]
    assert found["histograms"][0]["counts"] == [printed["envs"][0]["counts_a"], printed["envs"][0]["counts_b"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/groups?limit=1000000", 400, "a whole number from 1 to 100 is needed"),
        ("/api/groups?limit=x", 400, "a whole number"),
        ("/api/groups?before=0", 400, "a whole number"),
        ("/api/groups?score=high", 400, "score"),
        ("/api/groups?nonsense=1", 400, "'nonsense' is no parameter here"),
        ("/api/groups?" + "a=1&" * 100, 400, "query"),
        ("/api/groups?" + "x" * 5000, 400, "5000 characters"),
        ("/api/comparison?a=live", 400, "two revisions are needed"),
        ("/api/groups/nosuch", 400, "'nosuch' is no group id"),
        (f"/api/groups/{'f' * 32}", 404, "f" * 32),
    ],
)
async def test_a_bad_request_is_answered_in_words(world: World, path: str, status: int, says: str) -> None:
    async with page(world) as (client, _):
        answer = await client.get(path)
        assert (answer.status_code, says in answer.json()["error"]) == (status, True), answer.text


@pytest.mark.slow
async def test_no_other_page_gets_an_answer_and_nothing_can_be_changed(world: World) -> None:
    async with page(world) as (client, _):
        for path in ("/", "/page.js", "/page.css", "/api/run"):
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        for headers in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"},
        ):
            assert (await client.get("/api/run", headers=headers)).status_code == 403
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await client.request(method, "/api/run")).status_code == 405
        assert (await client.get("/../api.py")).status_code == 404


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])  # noqa: S104 - what is tried
async def test_nothing_of_the_run_is_shown_without_the_token(world: World, host: str) -> None:
    async with page(world, "--host", host) as (_, url):
        assert (world.folder / "runs" / RUN / "web.token").stat().st_mode & 0o077 == 0
        port = url.partition("?")[0].rstrip("/").rpartition(":")[2]
        token = url.rpartition("?token=")[2]
        assert len(token) > 20
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert (await client.get("/api/run")).status_code == 401
            assert (await client.get("/", params={"token": "wrong"})).status_code == 401
            given = await client.get("/", params={"token": token})
            assert (given.status_code, given.headers["location"]) == (303, "/")
            assert {"HttpOnly", "SameSite=strict"} <= set(given.headers["set-cookie"].split("; "))
            assert (await client.get("/api/run")).status_code == 200  # by the cookie


@pytest.mark.slow
async def test_of_a_group_of_very_many_samples_the_first_are_shown(world: World) -> None:
    count = MAX_SAMPLES + 76
    many = a_group(7, samples=count, tokens=2)
    talk = [Message(role="user", content="?"), Message(role="assistant", content="needle")]
    await world.store(many.replace(messages=[talk] * count))
    async with page(world) as (client, _):
        (row,) = (await client.get("/api/groups", params={"text": "needle"})).json()["groups"]
        assert (row["group"], row["samples"]) == (many.id, count)
        group = (await client.get(f"/api/groups/{many.id}")).json()
        assert len(group["view"]["samples"]) == len(group["tokens"]) == MAX_SAMPLES
        assert group["view"]["row"]["samples"] == count, "the page says that there are more"
        last = (await client.get(f"/api/groups/{many.id}", params={"sequence": count - 1})).json()["tokens"]
        assert [one["sequence"] for one in last] == [count - 1]
        beyond = (await client.get(f"/api/groups/{many.id}", params={"sequence": (1 << 53) - 1})).json()["tokens"]
        assert beyond == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: apt-get install chromium")
async def test_a_browser_shows_the_run_and_runs_nothing_of_it(world: World, tmp_path: Path) -> None:
    def shown(address: str) -> str:
        done = subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
                *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=5000"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", address),
            ],
            capture_output=True, check=True, timeout=120,
        )  # fmt: skip
        return done.stdout.decode()

    async with page(world) as (client, url):
        overview = await anyio.to_thread.run_sync(shown, f"{url}#/")
        assert "Training reward" in overview
        assert "Step 5" in overview
        assert "Mean rating by rater, sums" in overview
        alone = await anyio.to_thread.run_sync(shown, f"{url}#/revisions")
        assert "has only its live revision" in alone
        browser = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts?item=FORGED")
        assert "&lt;img src=x" in browser
        assert "<img" not in browser
        assert "\x1b" not in browser
        group = (await client.get("/api/groups", params={"item": "FORGED"})).json()["groups"][0]["group"]
        detail = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts/{group}")
        assert "Sample 3" in detail
        assert re.findall(r">\s*(?:null|undefined|false)", detail) == [], "what is missing is left out"
        assert "best length first" in detail
        of_agents = (await client.get("/api/groups", params={"item": "5"})).json()["groups"][0]["group"]
        agents = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts/{of_agents}")
        assert agents.count("4 calls of the model</summary>") == 2
        calls = re.findall(r"<tr>(.*?)</tr>", agents[agents.index(">Call</th>") :].partition("</table>")[0], re.DOTALL)
        assert [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in calls] == [
            ["0", "2", "1", "3", "", "0", "0", "-"],
            ["1", "1", "1", "3", "", "0", "0.25", "-"],
            ["2", "2", "1", "3", "stop", "0", "0.5", "-"],
            ["3", "1", "1", "3", "stop", "0", "1", "-"],
        ]
        under_way = (await client.get("/api/groups", params={"item": "3"})).json()["groups"][0]["group"]
        assert "Under way for" in await anyio.to_thread.run_sync(shown, f"{url}#/rollouts/{under_way}")
        rated = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts?lowest=score&rating=length%3D0.5%3A")
        assert re.findall(r">([1-6])</a><span class=\"quiet small\"> sums", rated) == ["1", "2", "3", "4", "5"]
        assert 'data-name="length"' in rated
        assert "These come first of all that are stored." in rated
        none = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts?rating=length%3D0.6%3A")
        assert "No group that is stored fits." in none
        assert "&lt;script&gt;" in detail
        assert "<title>1</title>" not in detail
    subject = subjects.state(RUN, "trainer", subjects.LIVE, "main")
    await world.bus.publish(subject, encode(REPORT), msg_id="report")
    async with page(world, "--set", "training.steps=1") as (_, url):
        left_over = await anyio.to_thread.run_sync(shown, f"{url}#/rollouts/{under_way}")
        assert "<dt>From task to end</dt><dd>-</dd>" in left_over, "the clock goes on, and nothing waits"
    code, _, err = await world.lachesis("replay", "--revision", "again")
    assert code == 0, err
    async with page(world) as (_, url):
        compared = await anyio.to_thread.run_sync(shown, f"{url}#/revisions?a=live&b=again")
        assert "Most disputed" in compared
        assert "sign_flips" in compared
        assert "<svg" in compared
        assert "<img" not in compared
