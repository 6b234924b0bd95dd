"""`lachesis mcp` with the real client of the protocol, over both transports, from finding an environment to results."""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from integration.harness import CONFIG, SUMS
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import TextContent

from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.timeout(600)]

KNOWN: dict[str, dict[str, Any]] = {
    "rl_list_environments": {},
    "rl_select_environment": {"name": "sums"},
    "rl_get_current_config": {},
    "rl_edit_config": {"field": "group_size", "value": 4},
    "rl_test_inference": {"num_steps": 1, "group_size": 2, "models": ["a/model"]},
    "rl_start_training": {},
    "rl_check_status": {"run_id": "x"},
    "rl_stop_training": {"run_id": "x"},
    "rl_get_results": {"run_id": "x"},
    "rl_list_runs": {},
}
"""The tools of agents that trained with Atropos, with the arguments that they give."""
POLICY = """
preset = "rl"
[fields."training.steps"]
min = 1
max = 4
value = 4
[fields."environments.*.longest_tokens"]
locked = true
value = 64
[fields."environments.*.samples"]
value = 4
[fields."training.learner.max_tokens_per_microbatch"]
locked = true
[fields."training.lora.rank"]
[fields."environments.*.concurrency"]
locked = true
value = 4
[fields."batching.batch_size"]
min = 8
max = 64
value = 16
"""


class Agent:
    """One session. `ask` returns what a tool answers, `refused` the error that it answers with."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def ask(self, tool: str, **arguments: Any) -> Any:
        failed, text = await self._call(tool, arguments)
        assert not failed, text
        return json.loads(text)

    async def refused(self, tool: str, **arguments: Any) -> str:
        failed, text = await self._call(tool, arguments)
        assert failed, text
        return text

    async def _call(self, tool: str, arguments: dict[str, Any]) -> tuple[bool, str]:
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert isinstance(content, TextContent)
        return bool(result.is_error), content.text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=64), tmp_path / "model")
    (tmp_path / "base.toml").write_text(f'model = "model"\n{CONFIG.format(sums=SUMS, steps=1000)}')
    (tmp_path / "policy.toml").write_text(POLICY)
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return {**kept, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": path}


COMMAND = ("-m", "lachesis", "mcp", "--config", "base.toml", "--folder", str(SUMS.parent), "--policy", "policy.toml")


@asynccontextmanager
async def over_stdio(folder: Path) -> AsyncIterator[Agent]:
    server = StdioServerParameters(command=sys.executable, args=list(COMMAND), env=environ(folder), cwd=str(folder))
    async with Client(stdio_client(server)) as client:
        yield Agent(client)


@asynccontextmanager
async def over_http(folder: Path) -> AsyncIterator[Agent]:
    async with serving(folder) as (url, token):
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=60) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            yield Agent(client)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[str, str]]:
    """Yield the URL and the token of a server."""
    command = [sys.executable, *COMMAND, "--http", "127.0.0.1:0"]
    async with await anyio.open_process(command, env=environ(folder), cwd=folder) as server:
        assert server.stderr is not None
        said = ""
        try:
            with anyio.fail_after(60):
                while "\n" not in said:
                    said += (await server.stderr.receive()).decode()
            url = next(word for word in said.split() if word.startswith("http://")).rstrip(";")
            yield url, (folder / "state/lachesis/mcp.token").read_text().strip()
        finally:
            server.terminate()


async def test_an_agent_goes_from_finding_an_environment_to_results(folder: Path) -> None:
    async with over_http(folder) as agent:
        tools = {tool.name: tool for tool in (await agent.client.list_tools()).tools}
        for name, arguments in KNOWN.items():
            schema = tools[name].input_schema
            assert set(schema.get("required", ())) <= arguments.keys() <= schema["properties"].keys()
            assert tools[name].description
        found = await agent.ask("rl_list_environments")
        assert "sums" in [one["name"] for one in found["environments"]]
        assert "call rl_select_environment first" in await agent.refused("rl_start_training")
        assert "there are sums, " in await agent.refused("rl_select_environment", name="nope")
        await agent.ask("rl_select_environment", name="sums")

        shown = await agent.ask("rl_get_current_config")
        locked = {one["known_as"]: one["locked_value"] for one in shown["locked_fields"] if "known_as" in one}
        assert locked["max_token_length"] == 64
        assert locked["learning_rate"] == 4e-5
        free = {one.get("known_as"): one for one in shown["configurable_fields"]}
        assert (free["group_size"]["current_value"], free["batch_size"]["allowed"]) == (4, "8 to 64")
        assert await agent.ask("rl_edit_config", field="batch_size", value=8)
        for field, value, why in (
            ("batch_size", 128, "batching.batch_size: 128 is not allowed by the operator's policy: 8 to 64"),
            ("batch_size", "many", "batching.batch_size: expected `int`"),
            ("learning_rate", 1, "training.learner.learning_rate: locked by the operator's policy"),
            ("training", {"learner": {"learning_rate": 1.0}}, "training.learner.learning_rate: locked"),
            ("total_steps", 5, "training.steps: 5 is not allowed by the operator's policy: 1 to 4"),
            ("nonsense", 1, "unknown setting 'nonsense'"),
            ("a b=1", 1, "names no setting"),
        ):
            assert why in await agent.refused("rl_edit_config", field=field, value=value)

        asked = {"num_steps": 1, "group_size": 2}
        tested = await agent.ask("rl_test_inference", **asked)  # the run's own model
        assert [one["outcomes"] for one in tested["models"]] == [{"scored": 2}], tested
        assert "OPENROUTER_API_KEY is not set" in await agent.refused("rl_test_inference", **asked, models=["a/model"])

        run = (await agent.ask("rl_start_training"))["run_id"]
        assert run.startswith("sums-")
        with anyio.fail_after(180):
            while (status := await agent.ask("rl_check_status", run_id=run))["status"] != "finished":
                assert status["status"] in {"starting", "running", "stopping"}, status
                await anyio.sleep(1)
        assert status["metrics"]["step"] == 4
        assert status["running_time_minutes"] > 0  # how long it went on, also once it has ended
        assert status["metrics"].keys() >= {"reward_mean", "percent_correct", "staleness_mean", "end_to_end_p99_s"}
        assert status["metrics"]["eval_percent_correct"].keys() == {"sums"}
        assert status["logs"].keys() >= {"supervisor", "trainer", "scorer"}
        assert "is not running" in (await agent.ask("rl_stop_training", run_id=run))["message"]
        results = await agent.ask("rl_get_results", run_id=run)
        assert (results["state"], results["step"], results["history"][-1]["train/step"]) == ("finished", 4, 4)
        assert [one["run_id"] for one in (await agent.ask("rl_list_runs"))["runs"]] == [run]

        groups = (await agent.ask("rl_list_rollouts", run_id=run, limit=3))["groups"]
        assert len(groups) == 3
        assert (await agent.ask("rl_list_rollouts", run_id=run, limit=1))["groups"] == groups[:1]
        assert (await agent.ask("rl_list_rollouts", run_id=run, item="nosuch"))["groups"] == []
        rater = next(iter(groups[0]["ratings"]))
        everyone = (await agent.ask("rl_list_rollouts", run_id=run, limit=100))["groups"]
        for end, best in (("highest", max), ("lowest", min)):
            (first,) = (await agent.ask("rl_list_rollouts", run_id=run, limit=1, **{end: rater}))["groups"]
            wanted = best(one["ratings"][rater] for one in everyone if one["ratings"].get(rater) is not None)
            assert first["ratings"][rater] == wanted
        assert (await agent.ask("rl_list_rollouts", run_id=run, rating=[f"{rater}=0:"]))["groups"]
        nothing = await agent.ask("rl_list_rollouts", run_id=run, rating=["nosuch=0:"])
        assert nothing["message"] == "no group fits that has 'nosuch'"
        assert "give one of them" in await agent.refused("rl_list_rollouts", run_id=run, highest=rater, lowest=rater)
        group = groups[0]["group"]
        assert (await agent.ask("rl_show_rollout", run_id=run, group_id=group))["group"]
        assert (await agent.ask("rl_trace", run_id=run, group_id=group))["trace"]
        assert (await agent.ask("rl_health", run_id=run))["environments"][0]["env"] == "sums"
        await agent.ask("rl_replay", run_id=run, revision="again", settings=["advantage.estimator=grpo"])
        assert (await agent.ask("rl_compare", run_id=run, revision_a="live", revision_b="again"))["comparison"]
        assert "not found; the newest are" in await agent.refused("rl_check_status", run_id="nosuch")
        assert await agent.refused("rl_check_status", run_id="../model")


async def test_a_run_outlives_the_server_and_is_stopped_by_the_next(folder: Path) -> None:
    async with over_stdio(folder) as agent:
        await agent.ask("rl_select_environment", name="sums")
        await agent.ask("rl_edit_config", field="total_steps", value=4)
        await agent.ask("rl_edit_config", field="evaluate.every_steps", value=1000)
        run = (await agent.ask("rl_start_training"))["run_id"]
    async with over_http(folder) as agent:
        status = await agent.ask("rl_check_status", run_id=run)
        assert status["status"] in {"starting", "running", "stopping", "finished"}
        await agent.ask("rl_stop_training", run_id=run)
        assert (await agent.ask("rl_check_status", run_id=run))["status"] in {"stopped", "finished"}


async def test_nobody_reaches_a_tool_without_the_token_or_by_another_name(folder: Path) -> None:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    accepts = {"Accept": "application/json, text/event-stream"}
    async with serving(folder) as (url, token), httpx2.AsyncClient() as http:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
            assert (await http.post(url, json=body, headers={**accepts, **headers})).status_code == 401
        key = {**accepts, "Authorization": f"Bearer {token}"}
        assert (await http.post(url, json=body, headers={**key, "Host": "evil.example"})).status_code == 421
        origin = {"Origin": "http://evil.example"}
        assert (await http.post(url, json=body, headers={**key, **origin})).status_code == 403
    assert (folder / "state/lachesis/mcp.token").stat().st_mode & 0o077 == 0


STUB = Path(__file__).parents[2] / "unit" / "extensions" / "atropos" / "native" / "stub"
CLASSES = Path(__file__).parent / "atropos"


@asynccontextmanager
async def with_atropos(folder: Path) -> AsyncIterator[Agent]:
    """Offer classes of Atropos, on the stand-in library of the unit tests, without a policy."""
    env = environ(folder)
    env["PYTHONPATH"] = os.pathsep.join([str(STUB), env["PYTHONPATH"]])
    arguments = ["-m", "lachesis", "mcp", "--config", "base.toml", "--folder", str(CLASSES)]
    arguments += ["--atropos-python", sys.executable]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=env, cwd=str(folder))
    async with Client(stdio_client(server)) as client:
        yield Agent(client)


async def test_a_class_of_atropos_that_was_found_is_selected_set_by_its_names_and_trained(folder: Path) -> None:
    async with with_atropos(folder) as agent:
        found = {one["name"]: one for one in (await agent.ask("rl_list_environments"))["environments"]}
        assert found["Spelled"]["family"] == "atropos"
        assert found["Spelled"]["problem"] is None
        assert "note" not in await agent.ask("rl_select_environment", name="Spelled")
        for field, value in (
            ("group_size", 4),
            ("batch_size", 8),
            ("total_steps", 2),
            ("learning_rate", 1e-3),
            ("max_new_tokens", 16),
            ("max_token_length", 64),
            ("letters", "xyz"),
            ("environments.spelled.params.items", 40),
        ):
            await agent.ask("rl_edit_config", field=field, value=value)
        run = (await agent.ask("rl_start_training"))["run_id"]
        with anyio.fail_after(240):
            while (status := await agent.ask("rl_check_status", run_id=run))["status"] != "finished":
                assert status["status"] in {"starting", "running", "stopping"}, status
                await anyio.sleep(1)
        assert status["metrics"]["step"] == 2
        assert status["outcomes"]["batched"] >= 4
        text = (folder / "runs" / run / "run.toml").read_text()
        assert 'letters = "xyz"' in text
        assert "learning_rate = 0.001" in text


async def test_a_run_that_stands_still_says_by_which_outcomes(folder: Path) -> None:
    async with with_atropos(folder) as agent:
        await agent.ask("rl_select_environment", name="Flat")
        for field, value in (
            ("group_size", 4),
            ("batch_size", 8),
            ("max_new_tokens", 16),
            ("max_token_length", 64),
            ("scoring.raters", []),
        ):
            await agent.ask("rl_edit_config", field=field, value=value)
        run = (await agent.ask("rl_start_training"))["run_id"]
        try:
            with anyio.fail_after(240):
                while not (status := await agent.ask("rl_check_status", run_id=run))["notices"] or not any(
                    "no group was fit to train on" in line for line in status["notices"]
                ):
                    assert status["status"] in {"starting", "running"}, status
                    await anyio.sleep(1)
            assert status["outcomes"]["zero_variance"] >= 20
            assert "batched" not in status["outcomes"]
        finally:
            await agent.ask("rl_stop_training", run_id=run)
        stopped = await agent.ask("rl_check_status", run_id=run)
        assert stopped["outcomes"]["zero_variance"] >= 20
        assert any("no group was fit to train on" in line for line in stopped["notices"])
