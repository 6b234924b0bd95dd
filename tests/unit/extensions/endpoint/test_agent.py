"""An agent's program as an environment: what it is given, what stands, and what is named when it goes wrong."""

import base64
import errno
import hmac
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from unit.extensions.endpoint.test_resumption import LogOfGroup

from lachesis.pipeline.environment.config import CollectConfig
from lachesis.pipeline.environment.group_times import GroupTimes
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.probe import probe_environment
from lachesis.pipeline.environment.rollout import build_group, collect_group
from lachesis.pipeline.environment.session_calls import CallFigures, GroupCalls
from lachesis.pipeline.errors import EnvironmentCodeError, GroupTakenError, InfrastructureError, ServerAwayError
from lachesis.pipeline.extensions.endpoint import environment, server
from lachesis.pipeline.extensions.endpoint.agent_session import AgentSession
from lachesis.pipeline.extensions.endpoint.program import _new_folder, delete_left_folders
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.pipeline.scorer.scorer import EnvironmentScorer
from lachesis.pipeline.telemetry.clock import Clock
from lachesis.pipeline.telemetry.recorder import current_traceparent, recording
from lachesis.schemas.errors import ConfigError
from lachesis.testing import FakeInference

pytestmark = pytest.mark.outside

PROGRAM = Path(__file__).with_name("agent_program.py")
SAMPLING = SamplingParams(max_tokens=400)


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": "What is 2*3+1?", "answer": "7"}) + "\n")
    return str(path)


def agent(tasks: str, command: list[str] | None = None, **more: Any) -> Any:
    given = {"path": tasks, "time_limit_s": 60.0, **more}
    return load_environment("agent", {"command": command, **given} if command else given)


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def calculate(prompt: str, call: int) -> str:
    turn = prompt.count("<assistant>")
    if turn > 2:
        return "it is 7"
    name, a, b = (("multiply", 2, 3), ("add", 6, 1))[turn - 1]
    return f'<tool_call>{{"name": "{name}", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


async def collect(env: Any, reply: Any = calculate, n: int = 2) -> Any:
    async with env.running():
        return await collect_group(env, env.task(0), FakeInference(reply), n, SAMPLING)


def learned(session: Any) -> str:
    return FakeInference.show([t for t, mask in zip(session.tokens, session.loss_mask, strict=True) if mask])


async def test_a_loop_with_two_tools_is_one_sequence_of_the_models_own_tokens(tasks: str) -> None:
    draft = await collect(agent(tasks, [sys.executable, str(PROGRAM), "--reward"], reward="program"))
    assert draft.rewards == [{"right": 1.0}] * 2
    for session in draft.sessions:
        assert learned(session).count("<end>") == 3
        assert learned(session).endswith("it is 7<end>")
        assert [message.role for message in session.messages[-4:]] == ["tool", "assistant", "tool", "assistant"]
        assert session.messages[-2].content == "7"
        assert session.notes["agent"]["output"] == "the agent said it is 7"
    group = build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="0" * 64)
    assert [notes["calls"] for notes in group.metadata["samples"]] == [{"all": 3, "trained": 3}] * 2


def calculate_in_a_team(prompt: str, call: int) -> str:
    asked = prompt.rsplit("<user>", maxsplit=1)[-1]
    said = {"Help": "a helper's letter", "So far": "it is 7 after all", "Say it": "seven"}
    return next((text for start, text in said.items() if asked.startswith(start)), "") or calculate(prompt, call)


async def test_two_tools_a_sub_agent_and_a_compaction_in_one_run_train_each_sampled_token_once(tasks: str) -> None:
    inference = FakeInference(calculate_in_a_team)
    env = agent(tasks, [sys.executable, str(PROGRAM), "--team", "--reward"], reward="program")
    async with env.running():
        draft = await collect_group(env, env.task(0), inference, 2, SAMPLING)
    assert draft.rewards == [{"right": 1.0}] * 2
    prompts = [tuple(prompt) for prompt, _, _ in inference.requests]
    for session in draft.sessions:
        assert session.notes["calls"] == {"all": 7, "trained": 7}
        tools = "".join(calculate("<assistant>" * turn, 0) + "<end>" for turn in (1, 2, 3))
        assert sorted(map(learned, session.sequences)) == sorted([
            "seven<end>", f"{tools}seven<end>", "a helper's letter<end>", "it is 7 after all<end>",
        ])  # fmt: skip
        for one in session.sequences:
            last = len(one.tokens) - one.loss_mask[::-1].index(False)
            assert tuple(one.tokens[:last]) in prompts, "the tokens before an answer are those of its request"
    group = build_group(draft, run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="0" * 64)
    assert group.sequences.sample_index == [0] * 4 + [1] * 4


async def test_raters_judge_an_agent_that_reports_nothing_and_it_does_not_see_their_answers(
    tasks: str, tmp_path: Path
) -> None:
    code = "import json, os, runpy; assert 'task' not in json.load(open(os.environ['LACHESIS_TASK']))\n"
    command = script(tmp_path, code + f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    draft = await collect(agent(tasks, command))
    assert draft.rewards == [{}, {}]
    assert draft.task.task["answer"] == "7"


FORCING = """
import json, os, urllib.request

def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=60))

def ask(**more):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "policy", "messages": messages, **more}
    messages.append(post(url, body)["choices"][0]["message"])
    return messages[-1]

messages = json.load(open(os.environ["LACHESIS_TASK"]))["messages"]
schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]}
tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
called = ask(tools=tools, tool_choice="required")["tool_calls"][0]
assert called["function"]["name"] == "add"
assert json.loads(called["function"]["arguments"])["a"] >= 3
messages.append({"role": "tool", "content": "7", "tool_call_id": called["id"]})
form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
assert json.loads(ask(response_format=form)["content"])["a"] >= 3
messages.append({"role": "user", "content": "And freely?"})
ask()
post(os.environ["LACHESIS_SESSION_URL"] + "/reward", {"reward": 1})
"""


@pytest.mark.parametrize(
    ("kept", "may_force", "named"),
    [
        ('"minimum": 3', True, []),
        ('"minimum": 3', False, ["it forces what an answer must match"]),
        ('"not": {}', True, ["not tried to the end: structured_outputs: scripted answers do not follow not"]),
    ],
)
async def test_an_agent_that_forces_answers_is_tried_on_ones_that_match(
    tasks: str, tmp_path: Path, kept: str, may_force: bool, named: list[str]
) -> None:
    env = agent(tasks, script(tmp_path, FORCING.replace('"minimum": 3', kept)), reward="program")
    scorer = EnvironmentScorer(ScoringConfig(), None, explains=True)
    found = await probe_environment(env, "e", scorer, may_force=may_force)
    assert len(found) == len(named), found
    assert all(finding.text.startswith(start) for finding, start in zip(found, named, strict=True)), found


CALL = f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"


@pytest.mark.parametrize(
    ("code", "more", "named"),
    [
        ("print('so long')", {}, "reported no reward.*exited with status 0(.|\n)*so long"),
        (CALL + "raise SystemExit(3)", {}, "status 3"),
        (CALL + "import time; time.sleep(1000)", {"time_limit_s": 3.0}, "time_limit_s"),
        ("while True: print('x' * 1000)", {"output_bytes": 100_000}, "output_bytes"),
        ("print('x' * 9000 + ' the last words')", {}, "the last words"),
        ("pass", {"reward": "raters"}, "no answer of the model"),
        (CALL + "raise SystemExit(3)", {"reward": "raters"}, "status 3"),
    ],
)
async def test_a_program_that_goes_wrong_costs_its_sample_and_is_named(
    tasks: str, tmp_path: Path, code: str, more: dict[str, Any], named: str
) -> None:
    env = agent(tasks, script(tmp_path, code), **{"reward": "program", **more})
    with pytest.raises(EnvironmentCodeError, match=named):
        await collect(env)


def leaving(left: Path) -> str:
    """Return code that leaves two daemons with no variables, each in a session of its own, with its pid in `left`."""
    daemon = f"import os, time; open({str(left)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(1000)"
    start = f"import subprocess, sys\nargs = [sys.executable, '-c', {daemon!r}]\n"
    start += "for _ in range(2): subprocess.Popen(args, env={}, start_new_session=True)\n"
    start += f"import pathlib\nleft = pathlib.Path({str(left)!r})\nleft.touch()\n"
    return start + "while len(left.read_text().split()) < 2: pass\n"


@pytest.mark.parametrize("more", ["", "while True: pass"])
async def test_what_a_program_leaves_running_is_killed_and_counted(tasks: str, tmp_path: Path, more: str) -> None:
    left = tmp_path / "left"
    code = leaving(left) + "sys.argv.append('--reward')\n" + CALL + more
    draft = await collect(agent(tasks, script(tmp_path, code), reward="program"), n=1)
    (session,) = draft.sessions
    assert session.notes["agent"]["left"] == 2
    assert session.notes["agent"]["why"] == ("stopped" if more else "exited")
    assert not any(is_running(int(pid)) for pid in left.read_text().split()), "it is over when the sample is"


RUN_PROGRAM = """
import anyio, os, sys
from lachesis.pipeline.extensions.endpoint.program import run_program
command = [sys.executable, sys.argv[1]]
anyio.run(lambda: run_program(
    command, dict(os.environ), b"{}", time_limit_s=1000.0, output_bytes=1000, ended=anyio.sleep_forever
))
"""


async def test_what_a_program_has_started_ends_with_the_environments_process_also_if_that_is_killed(
    tmp_path: Path,
) -> None:
    left, own = tmp_path / "left", tmp_path / "own"
    code = leaving(left) + f"import os; open({str(own)!r}, 'w').write(str(os.getpid()))\nwhile True: pass"
    _, path = script(tmp_path, code)
    process = await anyio.open_process([sys.executable, "-c", RUN_PROGRAM, path])
    with anyio.fail_after(60):
        while not (own.exists() and own.read_text()):  # noqa: ASYNC110 - its start sends nothing
            await anyio.sleep(0.01)
        process.kill()
        await process.aclose()
        pids = [int(pid) for pid in (left.read_text() + own.read_text()).split()]
        while any(map(is_running, pids)):  # noqa: ASYNC110 - its end sends nothing
            await anyio.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process is there; one that was killed and not yet reaped is not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_a_sample_without_a_reward_in_its_time_may_be_given_one_by_the_configuration(
    tasks: str, tmp_path: Path
) -> None:
    command = script(tmp_path, CALL + "import time; time.sleep(1000)")
    draft = await collect(agent(tasks, command, reward="program", overdue_reward=-1.0, time_limit_s=3.0))
    assert draft.rewards == [{"environment": -1.0}] * 2


async def test_an_outage_of_inference_is_no_fault_of_the_agent(tasks: str) -> None:
    def fail(prompt: str, call: int) -> str:
        raise ServerAwayError("gone")

    with pytest.raises(InfrastructureError, match="gone"):
        await collect(agent(tasks, [sys.executable, str(PROGRAM)]), fail)


CALL_TWICE = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]["content"]
ask("second " + ask("first"))
body = json.dumps({"reward": 1}).encode()
headers = {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["LACHESIS_SESSION_URL"] + "/reward", body, headers))
"""


class OneIsLate(FakeInference):
    """Answers all but the second call of one sample, at which `fails` is awaited."""

    def __init__(self, fails: Any) -> None:
        super().__init__(lambda prompt, call: "here" if call else "late")
        self.fails = fails

    async def generate(self, prompt_ids: Any, n: int, sampling: Any = None) -> Any:
        if "second late" in self.show(prompt_ids):
            await self.fails()
        return await super().generate(prompt_ids, n, sampling)


async def away() -> None:
    raise ServerAwayError("gone")


async def broken() -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("more", "rewards", "named"),
    [
        ({}, [1.0, 1.0], "reported no reward(.|\n)*time_limit_s"),
        ({"overdue_reward": -1.0}, [-1.0, 1.0, 1.0], None),
    ],
)
async def test_an_agent_whose_time_is_up_while_the_model_answers_is_overdue_and_costs_no_other_sample(
    tasks: str, tmp_path: Path, more: dict[str, Any], rewards: list[float], named: str | None
) -> None:
    env = agent(tasks, script(tmp_path, CALL_TWICE), reward="program", time_limit_s=4.0, **more)
    async with env.running():
        draft = await collect_group(env, env.task(0), OneIsLate(anyio.sleep_forever), 3, SAMPLING)
    assert sorted(found["environment"] for found in draft.rewards) == rewards
    assert [bool(re.search(named or "", failed.error)) for failed in draft.failures] == [True] * (3 - len(rewards))
    assert draft.lost == []


@pytest.mark.parametrize("lost_samples", ["drop", "refill"])
async def test_an_agent_that_waited_for_a_server_that_is_away_until_its_time_was_up_loses_its_sample_alone(
    tasks: str, tmp_path: Path, lost_samples: Any
) -> None:
    env = agent(tasks, script(tmp_path, CALL_TWICE), reward="program", time_limit_s=4.0, overdue_reward=-1.0)
    config = CollectConfig(attempts=1000, backoff_s=0.2, lost_samples=lost_samples)
    async with env.running():
        draft = await collect_group(env, env.task(0), OneIsLate(away), 3, SAMPLING, config=config)
    assert [found["environment"] for found in draft.rewards] == [1.0] * (2 if lost_samples == "drop" else 3)
    assert (len(draft.lost), draft.failures) == (1, [])


async def test_an_error_of_the_endpoints_own_code_costs_one_sample_and_is_named(tasks: str, tmp_path: Path) -> None:
    env = agent(tasks, script(tmp_path, CALL_TWICE), reward="program")
    async with env.running():
        draft = await collect_group(env, env.task(0), OneIsLate(broken), 3, SAMPLING)
    assert [found["environment"] for found in draft.rewards] == [1.0] * 2
    (failed,) = draft.failures
    assert "a bug" in failed.error


async def test_a_program_that_the_system_cannot_start_now_costs_its_sample(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tries = anyio.open_process, 0

    async def scarce(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*args, **options)

    monkeypatch.setattr(anyio, "open_process", scarce)
    draft = await collect(agent(tasks, script(tmp_path, CALL)), n=3)
    assert (len(draft.rewards), "temporarily" in draft.failures[0].error) == (2, True)


async def test_a_sample_that_no_agent_takes_in_time_is_lost_alone(tasks: str, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), time_limit_s=3.0)
    assert env.rollout_timeout_s > 2 * 3.0, "the wait for an agent, and then its time"
    drafts: list[Any] = []

    async def work() -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            one = LivingAgent(http)
            await one.start(env._server.url, token_file)
            await one.say(env._server.url, "begin")
            assert await one.report(env._server.url, 1.0) == 200

    async def collect_one() -> None:
        config = CollectConfig(lost_samples="drop")
        inference = FakeInference(lambda *_: "seven")
        drafts.append(await collect_group(env, env.task(0), inference, 3, SAMPLING, config=config))

    async with env.running(), anyio.create_task_group() as group:
        for one in (work, work, collect_one):
            group.start_soon(one)
    assert [found["environment"] for found in drafts[0].rewards] == [1.0] * 2
    assert len(drafts[0].lost) == 1


async def test_calls_are_traced_below_their_group_and_requests_to_the_engine_say_so(tasks: str) -> None:
    """The endpoint began before the group, and its server knows no group; the second time all calls are recorded."""
    log, parents = LogOfGroup(), set[str | None]()

    class Engine(FakeInference):
        async def generate(self, *args: Any, **options: Any) -> Any:
            parents.add(current_traceparent())
            return await super().generate(*args, **options)

    env = agent(tasks, [sys.executable, str(PROGRAM), "--reward"], reward="program")
    async with env.running():
        for name in ("chat policy", "recorded call"):
            with recording(Clock(), "environment", "ab" * 16, "cd" * 8) as spans:
                calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
                await collect_group(env, env.task(0), Engine(calculate), 1, SAMPLING, calls=calls)
            assert [span.name.startswith(name) for span in spans] == [True] * 3
            assert {(span.trace, span.parent) for span in spans} == {("ab" * 16, "cd" * 8)}
            if name == "chat policy":
                assert parents == {f"00-{'ab' * 16}-{span.id}-01" for span in spans}
            log.known.session("0.0").end = None


async def test_secrets_of_this_process_are_no_variables_of_the_program(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-of-the-run")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    seen = tmp_path / "seen"
    code = f"import json, os; open({str(seen)!r}, 'w').write(json.dumps([dict(os.environ), os.listdir()]))\n"
    await collect(agent(tasks, script(tmp_path, code + CALL), variables={"MORE": "1"}), n=1)
    variables, folder = json.loads(seen.read_text())
    assert "secret-of-the-run" not in variables.values()
    assert variables["OPENAI_API_KEY"] == variables["ANTHROPIC_API_KEY"]
    assert variables["OPENAI_BASE_URL"] == variables["ANTHROPIC_BASE_URL"] + "/v1"
    assert variables["MORE"] == "1"
    assert folder == ["task.json"]
    assert not os.path.exists(variables["PWD"])  # noqa: ASYNC240, PTH110


async def test_an_agent_elsewhere_takes_a_sample_once_there_is_one_and_ends_it_by_its_reward(
    tasks: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    drafts: list[Any] = []

    async with env.running(), httpx.AsyncClient() as client:
        url = env._server.url
        assert (await client.post(f"{url}/sessions")).status_code == 401
        bearer = {"Authorization": f"Bearer {token_file.read_text().strip()}"}

        async def work() -> None:
            started = (await client.post(f"{url}/sessions", headers=bearer, timeout=30)).json()
            key = {"Authorization": f"Bearer {started['key']}"}
            body = {"model": "policy", "messages": started["task"]["messages"]}
            answer = await client.post(f"{url}/v1/chat/completions", json=body, headers=key)
            assert answer.json()["choices"][0]["message"]["content"] == "seven"
            assert (await client.get(f"{started['url']}/task")).json()["task"]["answer"] == "7"
            for reward in (1, 1, 0):
                done = await client.post(f"{started['url']}/reward", json={"reward": reward})
                assert done.status_code in ({200, 401} if reward else {401, 409})

        async def collect_one() -> None:
            drafts.append(await collect_group(env, env.task(0), FakeInference(lambda *_: "seven"), 2, SAMPLING))

        async with anyio.create_task_group() as group:
            group.start_soon(work)  # it waits: there is no sample yet
            group.start_soon(work)
            await anyio.lowlevel.checkpoint()
            group.start_soon(collect_one)
        (draft,) = drafts
        assert draft.rewards == [{"environment": 1.0}] * 2


async def test_an_agent_elsewhere_gets_the_address_that_it_used_and_learns_that_its_sample_is_left_out(
    tasks: str, tmp_path: Path
) -> None:
    """The address may be that of several endpoints. It starts no second time, so an answer to its report is final."""
    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    async with env.running(), httpx.AsyncClient() as client:
        url = env._server.url
        headers = {"Authorization": f"Bearer {token_file.read_text().strip()}", "Host": "localhost:4242"}

        async def work() -> None:
            started = (await client.post(f"{url}/sessions", headers=headers, timeout=30)).json()
            assert started["url"] == f"http://localhost:4242/s/{started['key']}"
            assert started["openai_base_url"] == f"{started['url']}/v1"
            key = {"Authorization": f"Bearer {started['key']}"}
            done = await client.post(f"{url}/reward", json={"reward": 1}, headers=key)
            assert done.status_code == 409
            assert "left out: the agent got no answer of the model" in done.text

        async def collect_one() -> None:
            with pytest.raises(EnvironmentCodeError, match="got no answer"):
                await collect_group(env, env.task(0), FakeInference(lambda *_: "seven"), 2, SAMPLING)

        async with anyio.create_task_group() as group:
            for one in (work, work, collect_one):
                group.start_soon(one)


async def test_single_answers_have_rewards_by_their_ids_and_come_in_the_order_of_time(
    tasks: str, tmp_path: Path
) -> None:
    """Two calls of the agent, with one of a sub-agent between them, which is a sequence of its own."""
    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    async with env.running(), httpx.AsyncClient() as client:
        bearer: dict[str, str] = {}

        async def work() -> None:
            started = (await client.post(f"{env._server.url}/sessions", headers=bearer, timeout=30)).json()

            async def ask(*messages: dict[str, str]) -> tuple[str, dict[str, str]]:
                body = {"model": "policy", "messages": list(messages)}
                found = (await client.post(f"{started['openai_base_url']}/chat/completions", json=body)).json()
                return found["id"], found["choices"][0]["message"]

            begin = {"role": "user", "content": "begin"}
            first, said = await ask(begin)
            of_sub_agent, _ = await ask({"role": "user", "content": "help"})
            last, _ = await ask(begin, said, {"role": "user", "content": "and now?"})
            for turns, status in (({"chatcmpl-none": 1}, 400), ({first: 1, of_sub_agent: 2, last: "x"}, 400)):
                report = {"reward": 0.5, "turns": turns}
                answer = await client.post(f"{started['url']}/reward", json=report)
                assert (answer.status_code, "turns" in answer.text) == (status, True)
            report = {"reward": 0.5, "turns": {last: 4, of_sub_agent: 2}}
            assert (await client.post(f"{started['url']}/reward", json=report)).status_code == 200

        drafts: list[Any] = []

        async def collect_one() -> None:
            reply = FakeInference(lambda prompt, call: f"{prompt[-9:]} {call}")
            drafts.append(await collect_group(env, env.task(0), reply, 2, SAMPLING))

        async with anyio.create_task_group() as group:
            bearer["Authorization"] = f"Bearer {token_file.read_text().strip()}"
            group.start_soon(work)
            group.start_soon(work)
            group.start_soon(collect_one)
    made = build_group(drafts[0], run="r", env="e", producer="p", epoch=1, counter=1, tokenizer_hash="t")
    assert made.sequences.turn_rewards == [[0.0, 2.0, 4.0]] * 2
    assert made.sequences.turn_order == [[1, 0, 2]] * 2
    assert made.sequences.rewards == {"environment": [0.5, 0.5]}


FUNCTIONS = """
import json, os, urllib.request
def said(task):
    body = json.dumps({"model": "policy", "messages": task["messages"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
def number(task):
    return said(task) == task["task"]["answer"]
async def by_name(task):
    import server  # beside this file, and not that of the endpoint
    return {"right": float(said(task) == task["task"]["answer"]), "style": None, "server": server.NUMBER}
def nothing(task):
    said(task)
def one(task):
    said(task)
    return 1
def text(task):
    return said(task)
def broken(task):
    print("so far")
    raise KeyError("colour")
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text("NUMBER = 0.5")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["functions.py", "functions"])
async def test_a_function_is_an_agent_and_what_it_returns_is_the_reward(
    tasks: str, functions: str, source: str
) -> None:
    def reply(prompt: str, call: int) -> str:
        return "7" if call else "8"

    draft = await collect(agent(tasks, function=f"{source}:number", folder=functions), reply)
    assert sorted(rewards["environment"] for rewards in draft.rewards) == [0.0, 1.0]
    draft = await collect(agent(tasks, function=f"{source}:by_name", folder=functions), lambda *_: "7")
    assert draft.rewards == [{"right": 1.0, "style": None, "server": 0.5}] * 2
    draft = await collect(agent(tasks, function=f"{source}:nothing", folder=functions, reward="raters"))
    assert draft.rewards == [{}, {}]


@pytest.mark.parametrize(
    ("name", "more", "named"),
    [
        ("nothing", {}, r"reported no reward \(a function returns it\); it exited with status 0"),
        ("text", {}, "returned 'seven': a reward is a finite number"),
        ("broken", {}, "status 1(.|\\n)*so far(.|\\n)*functions.py(.|\\n)*KeyError: 'colour'"),
        ("missing", {}, "has no function 'missing'"),
        ("one", {"reward": "raters"}, "the reward is refused(.|\\n)*raters score this sample"),
    ],
)
async def test_a_function_that_goes_wrong_costs_its_sample_and_is_named(
    tasks: str, functions: str, name: str, more: dict[str, Any], named: str
) -> None:
    with pytest.raises(EnvironmentCodeError, match=named):
        await collect(agent(tasks, function=f"functions.py:{name}", folder=functions, **more), lambda *_: "seven")


LATER = "import os; open({path!r}, 'a').write(os.environ['LACHESIS_SESSION_URL'] + '\\n')\n"


async def sessions_in(path: Path, count: int) -> list[str]:
    """Return the addresses of so many sessions, once their agents have written them."""
    with anyio.fail_after(60):
        while len(found := path.read_text().split() if path.exists() else []) < count:  # noqa: ASYNC110, ASYNC240
            await anyio.sleep(0.01)
    return found


async def report(client: httpx.AsyncClient, url: str, reward: float) -> int:
    return (await client.post(f"{url}/reward", json={"reward": reward}, timeout=60)).status_code


async def test_a_reward_may_come_after_the_agents_end_and_is_stored_before_it_is_answered(
    tasks: str, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    command = script(tmp_path, CALL + LATER.format(path=str(seen)))
    env = agent(tasks, command, reward="program", late_reward_s=60.0)
    assert any("late_reward_s" in doubt for doubt in env.doubts)
    drafts: list[Any] = []

    async def judge() -> None:
        urls = await sessions_in(seen, 2)
        async with httpx.AsyncClient() as client:
            for number, url in enumerate(urls):
                session = env._server._live[url.rpartition("/")[2]].recorded
                await session.agent_ended.wait()
                refused = await client.post(f"{url}/v1/chat/completions", json={"messages": [], "model": "m"})
                assert refused.status_code in {400, 409}
                assert [await report(client, url, value) for value in (number, number, 9)] == [200, 200, 409]
                assert session.session.ended.is_set()

    async def collect_one() -> None:
        drafts.append(await collect_group(env, env.task(0), FakeInference(calculate), 2, SAMPLING))

    async with env.running(), anyio.create_task_group() as group:
        group.start_soon(judge)
        group.start_soon(collect_one)
    assert sorted(rewards["environment"] for rewards in drafts[0].rewards) == [0.0, 1.0]  # 0 is a reward


async def test_a_late_reward_that_does_not_come_is_named_and_the_wait_is_noticed(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_NOTICED_S", 0.0)
    env = agent(tasks, script(tmp_path, CALL), reward="program", late_reward_s=1.0)
    noticed: set[str | None] = set()

    async def watch() -> None:
        while True:
            noticed.add(env.waits_for and env.waits_for[:32])
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        with pytest.raises(
            EnvironmentCodeError, match=r"none came within 1 s \(late_reward_s\).*; it exited with status 0"
        ):
            await collect(env)
        group.cancel_scope.cancel()
    assert "2 samples wait for their rewards" in noticed
    assert env.waits_for is None


async def test_a_successor_takes_the_late_reward_of_a_session_by_its_key_and_address(
    tasks: str, tmp_path: Path
) -> None:
    """The first process is killed while it waits; the agent starts again, and its one call is not sampled again."""
    seen, log = tmp_path / "seen", LogOfGroup()
    command = script(tmp_path, CALL + LATER.format(path=str(seen)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = 0

    def counted(prompt: str, call: int) -> str:
        nonlocal made
        made += 1
        return calculate(prompt, call)

    def life() -> Any:
        params = {"reward": "program", "late_reward_s": 60.0, "port": port, "token_file": str(tmp_path / "token")}
        env = agent(tasks, command, **params)
        assert env.doubts == []
        calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
        return env, collect_group(env, env.task(0), FakeInference(counted), 1, SAMPLING, calls=calls)

    env, collecting = life()
    async with anyio.create_task_group() as group, env.running():
        group.start_soon(lambda: collecting)
        (url,) = await sessions_in(seen, 1)
        await env._server._live[url.rpartition("/")[2]].recorded.agent_ended.wait()
        group.cancel_scope.cancel()
    env, collecting = life()
    drafts: list[Any] = []

    async def collect_one() -> None:
        drafts.append(await collecting)

    async with env.running(), httpx.AsyncClient() as client, anyio.create_task_group() as group:
        group.start_soon(collect_one)
        assert len(set(await sessions_in(seen, 2))) == 1
        assert await report(client, url, 0.25) == 200
    assert drafts[0].rewards == [{"environment": 0.25}]
    assert log.known.session("0.0").end.rewards == {"environment": 0.25}  # type: ignore[union-attr]
    assert made == 3  # of two lives


async def test_an_agent_elsewhere_says_that_it_has_ended_and_its_reward_comes_later(tasks: str, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), late_reward_s=60.0)
    drafts: list[Any] = []

    async def work() -> None:
        bearer = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
        async with httpx.AsyncClient(timeout=60) as client:
            started = (await client.post(f"{env._server.url}/sessions", headers=bearer)).json()
            ask = {"model": "policy", "messages": started["task"]["messages"]}
            for status in (200, 409):
                answer = await client.post(f"{started['openai_base_url']}/chat/completions", json=ask)
                assert answer.status_code == status
                assert (await client.post(f"{started['url']}/end")).status_code == 200
            assert await report(client, started["url"], 1.0) == 200

    async def collect_one() -> None:
        drafts.append(await collect_group(env, env.task(0), FakeInference(lambda *_: "seven"), 1, SAMPLING))

    async with env.running(), anyio.create_task_group() as group:
        group.start_soon(work)
        group.start_soon(collect_one)
    assert drafts[0].rewards == [{"environment": 1.0}]


class LivingAgent:
    """An agent that runs elsewhere, and lives on while endpoints are killed."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.key: dict[str, str] = {}
        self.history: list[Any] = [{"role": "user", "content": "What is 2*3+1?"}]

    async def start(self, url: str, token_file: Path) -> None:
        bearer = {"Authorization": f"Bearer {await anyio.Path(token_file).read_text()}".strip()}
        started = await self.http.post(f"{url}/sessions", headers=bearer)
        assert started.status_code == 200, started.text
        self.key = {"Authorization": f"Bearer {started.json()['key']}"}

    async def ask(self, url: str, **headers: str) -> httpx.Response:
        body = {"model": "policy", "messages": self.history}
        return await self.http.post(f"{url}/v1/chat/completions", json=body, headers={**self.key, **headers})

    async def say(self, url: str, text: str, **headers: str) -> str:
        """Say something more, and return the answer to it."""
        self.history.append({"role": "user", "content": text})
        answer = await self.ask(url, **headers)
        assert answer.status_code == 200, answer.text
        self.history.append(answer.json()["choices"][0]["message"])
        found: str = self.history[-1]["content"]
        return found

    async def ask_again(self, url: str) -> str:
        """Return the answer to what was said last, as an SDK requests it again."""
        answer = await self.ask(url, **{"x-stainless-retry-count": "1"})
        assert answer.status_code == 200, answer.text
        self.history.append(answer.json()["choices"][0]["message"])
        found: str = self.history[-1]["content"]
        return found

    async def report(self, url: str, reward: float) -> int:
        return (await self.http.post(f"{url}/reward", json={"reward": reward}, headers=self.key)).status_code


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


async def test_an_agent_that_outlives_its_endpoint_goes_on_in_its_session_which_no_other_agent_gets(
    tasks: str, tmp_path: Path
) -> None:
    """The endpoint is killed after two calls; its successor has the session from the log, and waits for the agent."""
    token_file, log, made, port = tmp_path / "token", LogOfGroup(), list[str](), free_port()
    url, drafts = f"http://127.0.0.1:{port}", list[Any]()

    def numbered(prompt: str, call: int) -> str:
        made.append(prompt)
        return f"answer {len(made)}"

    def life() -> Any:
        return agent(tasks, reward="program", token_file=str(token_file), port=port, hold_s=20.0)

    async def collect_one(env: Any) -> None:
        calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
        drafts.append(await collect_group(env, env.task(0), FakeInference(numbered), 1, SAMPLING, calls=calls))

    async with httpx.AsyncClient(timeout=60) as http:
        mine, env = LivingAgent(http), life()
        async with env.running(), anyio.create_task_group() as group:
            group.start_soon(collect_one, env)
            await mine.start(url, token_file)
            assert [await mine.say(url, "begin"), await mine.say(url, "more")] == ["answer 1", "answer 2"]
            group.cancel_scope.cancel()
    log.is_taken_up = True
    async with httpx.AsyncClient(timeout=60) as http:
        mine.http, env = http, life()
        async with env.running(), anyio.create_task_group() as group:
            group.start_soon(collect_one, env)
            while not env._server._live:
                await anyio.lowlevel.checkpoint()
            assert not env._server._open, "its agent may still be there"
            mine.history.pop()  # its connection broke before the answer was there
            assert await mine.ask_again(url) == "answer 2"
            assert await mine.say(url, "and now?") == "answer 3"
            assert await mine.report(url, 0.5) == 200
    assert drafts[0].rewards == [{"environment": 0.5}]
    assert len(made) == 3
    (session,) = drafts[0].sessions
    assert [len(session.sequences), session.notes["calls"]] == [1, {"all": 3, "trained": 3}]
    assert learned(session) == "answer 1<end>answer 2<end>answer 3<end>"


async def test_a_sample_is_one_agents_at_a_time_also_if_it_was_silent_from_its_start_on_across_a_kill(
    tasks: str, tmp_path: Path
) -> None:
    """For `hold_s` no other agent gets it, though it has made no call; then another does, and the first one is gone."""
    token_file, log, drafts, taken = tmp_path / "token", LogOfGroup(), list[Any](), list[LivingAgent]()

    async def collect_one(env: Any) -> None:
        calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
        inference = FakeInference(lambda *_: "seven")
        drafts.append(await collect_group(env, env.task(0), inference, 1, SAMPLING, calls=calls))

    for _ in range(2):
        env = agent(tasks, reward="program", token_file=str(token_file), hold_s=0.5)
        async with httpx.AsyncClient(timeout=60) as http, env.running(), anyio.create_task_group() as group:
            group.start_soon(collect_one, env)
            url, one = env._server.url, LivingAgent(http)
            if log.is_taken_up:  # if its group is not there yet, its agent requests again
                stranger = LivingAgent(http)
                stranger.key = {"Authorization": taken[0].key["Authorization"].replace("Bearer ", "Bearer x")}
                answer = await stranger.ask(url)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                stranger.key = {"Authorization": "Bearer nobody"}
                assert (await stranger.ask(url)).status_code == 401
            while not (log.is_taken_up and env._server._live) and not env._server._open:
                await anyio.lowlevel.checkpoint()
            while not env._server._open:  # noqa: ASYNC110 - for `hold_s`
                await anyio.sleep(0.01)
            await one.start(url, token_file)
            taken.append(one)
            if log.is_taken_up:
                taken[0].http = http
                assert await one.say(url, "begin") == "seven"
                answer = await taken[0].ask(url)
                assert (answer.status_code, "another agent" in answer.text) == (401, True)
                assert await taken[0].report(url, 0.0) == 401
                assert await one.report(url, 1.0) == 200
            else:
                group.cancel_scope.cancel()
        log.is_taken_up = True
    assert drafts[0].rewards == [{"environment": 1.0}]
    assert drafts[0].sessions[0].notes["calls"] == {"all": 1, "trained": 1}


async def test_a_replica_that_was_stopped_holds_up_no_request_once_its_session_is_taken_up_here(
    tasks: str, tmp_path: Path
) -> None:
    """In its place stands a listener that accepts connections and is silent, as the system does for a stopped one."""
    token_file, log, drafts = tmp_path / "token", LogOfGroup(), list[Any]()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peers = [f"http://127.0.0.1:{silent.getsockname()[1]}"]
        env = agent(tasks, reward="program", token_file=str(token_file), port=free_port(), hold_s=20.0, peers=peers)
        log.is_taken_up = True
        calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
        async with httpx.AsyncClient(timeout=20) as http, env.running(), anyio.create_task_group() as group:
            mac = hmac.digest(token_file.read_text().strip().encode(), calls.open(0).name.encode(), "sha256")
            mine = LivingAgent(http)
            mine.key = {"Authorization": f"Bearer {base64.urlsafe_b64encode(mac).decode().rstrip('=')}.7"}

            async def take_up() -> None:
                connection, _ = await anyio.to_thread.run_sync(silent.accept)  # the request was passed on
                inference = FakeInference(lambda *_: "a")
                with connection:
                    drafts.append(await collect_group(env, env.task(0), inference, 1, SAMPLING, calls=calls))

            group.start_soon(take_up)
            assert await mine.say(env._server.url, "begin") == "a"
            assert await mine.report(env._server.url, 1.0) == 200
    assert drafts[0].rewards == [{"environment": 1.0}]


class GatedInference(FakeInference):
    """Answers once its gate is open; `begun` counts the requests that wait for that."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, call: f"answer {call}")
        self.gate, self.begun = anyio.Event(), 0

    async def generate(self, *args: Any, **options: Any) -> Any:
        self.begun += 1
        await self.gate.wait()
        return await super().generate(*args, **options)

    async def until_begun(self, count: int) -> None:
        while self.begun < count:  # noqa: ASYNC110 - a request passes through a socket
            await anyio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_sent_again_by_a_client_that_has_hung_up_is_one_sample(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """No header says that it is a retry. Two requests of clients that both wait stay two samples."""
    token_file, inference, drafts, asked = tmp_path / "token", GatedInference(), list[Any](), 0
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    answer = AgentSession.answer
    monkeypatch.setattr(server, "_PING_S", 0.05)

    async def counted(*args: Any, **options: Any) -> Any:
        nonlocal asked
        asked += 1
        return await answer(*args, **options)

    monkeypatch.setattr(AgentSession, "answer", counted)

    async def collect_one() -> None:
        drafts.append(await collect_group(env, env.task(0), inference, 1, SAMPLING))

    async with httpx.AsyncClient(timeout=20) as http, env.running(), anyio.create_task_group() as group:
        group.start_soon(collect_one)
        mine = LivingAgent(http)
        await mine.start(env._server.url, token_file)
        url, body = f"{env._server.url}/v1/chat/completions", {"model": "policy", "messages": mine.history}
        async with anyio.create_task_group() as patient:
            patient.start_soon(lambda: http.post(url, json={**body, "stream": stream}, headers=mine.key))
            await inference.until_begun(1)
            patient.cancel_scope.cancel()
        got: list[str] = []

        async def ask() -> None:
            found = (await http.post(url, json=body, headers=mine.key)).json()
            got.append(found["choices"][0]["message"]["content"])

        async with anyio.create_task_group() as both:
            both.start_soon(ask)
            while asked < 2:  # noqa: ASYNC110 - a request passes through a socket
                await anyio.sleep(0.01)
            both.start_soon(ask)
            await inference.until_begun(2)
            inference.gate.set()
        assert await mine.report(env._server.url, 1.0) == 200
    assert sorted(got) == ["answer 0", "answer 1"]
    assert inference.begun == 2
    assert drafts[0].sessions[0].notes["calls"] == {"all": 2, "trained": 2}


async def test_tokens_are_counted_without_an_answer_and_what_is_not_served_says_so_in_its_dialect(
    tasks: str, tmp_path: Path
) -> None:
    token_file, inference = tmp_path / "token", FakeInference(lambda *_: "a")
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    async with httpx.AsyncClient(timeout=20) as http, env.running(), anyio.create_task_group() as group:
        group.start_soon(collect_group, env, env.task(0), inference, 1, SAMPLING)
        mine = LivingAgent(http)
        url = env._server.url
        await mine.start(url, token_file)
        count = f"{url}/v1/messages/count_tokens"
        refused = await http.post(count, json={"messages": mine.history, "unheard_of": 1}, headers=mine.key)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        found = await http.post(count, json={"model": "m", "messages": mine.history}, headers=mine.key)
        assert not inference.requests
        await mine.ask(url)
        assert found.json() == {"input_tokens": len(inference.requests[0][0])}
        assert (await http.get(f"{url}/v1/models/policy", headers=mine.key)).json()["id"] == "policy"
        for method, path, status, kind in (
            ("GET", "/v1/models/other", 404, None),
            ("POST", "/v1/completions", 404, None),
            ("GET", "/v1/chat/completions", 405, None),
            ("POST", "/v1/messages/batches", 404, "error"),
        ):
            answer = await http.request(method, url + path, headers=mine.key)
            assert (answer.status_code, answer.json().get("type")) == (status, kind)
            assert path[-9:] in answer.json()["error"]["message"] or "other" in answer.json()["error"]["message"]
        key = mine.key["Authorization"].removeprefix("Bearer ")
        answer = await http.post(f"{url}/s/{key}/v1/embeddings")
        assert (answer.status_code, "POST /v1/embeddings" in answer.text, key in answer.text) == (404, True, False)
        await mine.report(url, 1.0)


async def test_a_peer_that_is_stopped_or_new_hides_no_session_of_another_one(tasks: str, tmp_path: Path) -> None:
    """Both are listed before the one that has the session."""
    token_file = tmp_path / "token"

    def replica(*peers: str) -> Any:
        return agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0, peers=list(peers))

    holder = replica()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with httpx.AsyncClient(timeout=20) as http, holder.running(), anyio.create_task_group() as group:
            inference = FakeInference(lambda *_: "a")
            group.start_soon(collect_group, holder, holder.task(0), inference, 1, SAMPLING)
            mine = LivingAgent(http)
            await mine.start(holder._server.url, token_file)
            new = replica()
            async with new.running():
                assert (await mine.ask(new._server.url)).status_code == 503, (
                    "it may take the session up, as far as it knows"
                )
                stopped = f"http://127.0.0.1:{silent.getsockname()[1]}"
                asked = replica(stopped, new._server.url, holder._server.url)
                async with asked.running():
                    assert await mine.say(asked._server.url, "begin") == "a"
                    assert await mine.report(asked._server.url, 1.0) == 200


async def test_no_agent_gets_a_sample_that_another_process_may_have_taken_up(tasks: str, tmp_path: Path) -> None:
    """This one was stopped while the sample was open, and goes on before it knows that its lease has ended."""

    class TakenLog(LogOfGroup):
        async def check_held(self) -> None:
            raise GroupTakenError("its lease has ended")

    token_file = tmp_path / "token"
    env = agent(tasks, reward="program", token_file=str(token_file), hold_s=20.0)
    calls = GroupCalls(TakenLog(), CallFigures())  # type: ignore[arg-type]
    async with httpx.AsyncClient(timeout=60) as http, env.running(), anyio.create_task_group() as group:

        async def collect() -> None:
            with pytest.raises(GroupTakenError):
                await collect_group(env, env.task(0), FakeInference(lambda *_: "a"), 1, SAMPLING, calls=calls)

        group.start_soon(collect)
        token = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
        answer = await http.post(f"{env._server.url}/sessions", headers=token)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")


async def test_either_of_two_endpoints_answers_any_session_also_when_one_is_killed(tasks: str, tmp_path: Path) -> None:
    """Two replicas in turn get the calls of one session; the one that holds it is killed, and the other takes it up."""
    token_file, log, made, port = tmp_path / "token", LogOfGroup(), list[str](), (free_port(), free_port())
    urls = [f"http://127.0.0.1:{one}" for one in port]

    def numbered(prompt: str, call: int) -> str:
        made.append(prompt)
        return f"answer {len(made)}"

    def replica(number: int) -> Any:
        given = {"token_file": str(token_file), "port": port[number], "hold_s": 20.0, "peers": urls}
        return agent(tasks, reward="program", **given)

    def collecting(env: Any) -> Any:
        calls = GroupCalls(log, CallFigures())  # type: ignore[arg-type]
        return collect_group(env, env.task(0), FakeInference(numbered), 1, SAMPLING, calls=calls)

    first, second, drafts = replica(0), replica(1), list[Any]()
    async with httpx.AsyncClient(timeout=60) as http, second.running():
        mine, stranger = LivingAgent(http), LivingAgent(http)
        async with first.running(), anyio.create_task_group() as group:
            group.start_soon(collecting, first)
            await mine.start(urls[0], token_file)
            assert [await mine.say(urls[at % 2], f"say {at}") for at in range(3)] == [
                "answer 1",
                "answer 2",
                "answer 3",
            ]
            stranger.key = {"Authorization": "Bearer nobody"}
            assert (await stranger.ask(urls[1])).status_code == 401
            group.cancel_scope.cancel()
        mine.history.pop()
        lost = await mine.ask(urls[1], **{"x-stainless-retry-count": "1"})
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "2")
        assert "is away or new; another one takes up what it held" in lost.text

        async def take_up() -> None:
            drafts.append(await collecting(second))

        async with anyio.create_task_group() as group:
            group.start_soon(take_up)
            while not second._server._live:
                await anyio.lowlevel.checkpoint()
            assert await mine.ask_again(urls[1]) == "answer 3"
            assert await mine.say(urls[1], "and now?") == "answer 4"
            assert await mine.report(urls[1], 1.0) == 200
    assert drafts[0].rewards == [{"environment": 1.0}]
    assert len(made) == 4


async def test_the_evaluator_leaves_the_port_to_the_environments_process(tasks: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port, other = free.getsockname()[1], 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        other = free.getsockname()[1]
    command = script(tmp_path, "pass")
    live, evaluated = agent(tasks, command, port=port), agent(tasks, command, port=port)
    elsewhere = {"port": port, "token_file": str(tmp_path / "token")}
    assert evaluated.begin_evaluation() is None
    assert "set evaluation_port" in agent(tasks, **elsewhere).begin_evaluation()
    told = agent(tasks, **elsewhere, evaluation_port=other)
    assert told.begin_evaluation() is None
    async with live.running(), evaluated.running(), told.running():
        assert live._server.url.endswith(f":{port}")
        assert told._server.url.endswith(f":{other}")


def test_how_long_an_agent_works_is_bounded_by_its_own_limit_alone(tasks: str) -> None:
    """Else a group would be ended as hanging after a multiple of what quicker agents took."""
    env = agent(tasks, ["x"], time_limit_s=600.0, reward="program", late_reward_s=300.0)
    times = GroupTimes(env.rollout_timeout_s, env.turn_timeout_s)
    for number in range(50):
        times.begin(number, 10.0 * number)
        times.end(number, 10.0 * number + 1, answered=True)
    times.begin("slow", 1000.0)
    assert times.hanging(1000.0 + 900.0) == []


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"command": ["x"]}, "either path"),
        ({"tasks": "spell_backward", "command": ["x"], "function": "a:b"}, "either command"),
        ({"tasks": "spell_backward", "command": ["x"], "python": "python3"}, "python is"),
        ({"tasks": "spell_backward", "function": "a.b"}, "module:name"),
        ({"tasks": "spell_backward", "function": "none.py:b"}, "no file .*none.py"),
        ({"tasks": "spell_backward", "command": ["x"], "late_reward_s": 5.0}, "late_reward_s"),
        ({"tasks": "spell_backward"}, "token_file"),
        ({"tasks": "spell_backward", "command": []}, "empty"),
        ({"tasks": "spell_backward", "command": ["x"], "host": "0.0.0.0"}, "host"),  # noqa: S104
        ({"tasks": "spell_backward", "command": ["x"], "overdue_reward": 0.0}, "overdue_reward"),
        ({"tasks": "spell_backward", "command": "'x"}, "cannot be read"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_environment("agent", params)


async def test_a_command_that_cannot_be_started_is_named(tasks: str) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        await collect(agent(tasks, ["no-such-program"]))


def test_folders_that_a_killed_process_left_are_deleted_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, new, others = (tmp_path / name for name in ("lachesis-agent-left", "lachesis-agent-new", "else"))
    for folder in (left, new, others):
        folder.mkdir()
        (folder / "task.json").write_text("{}")
    for folder in (left, others):
        os.utime(folder, (1.0, 1.0))
    used, lock = _new_folder(b"{}")
    os.utime(used.name, (1.0, 1.0))
    delete_left_folders()  # as an environment does when it starts
    assert not left.exists()
    assert all(Path(path, "task.json").exists() for path in (used.name, new, others))
    os.close(lock)
    used.cleanup()
