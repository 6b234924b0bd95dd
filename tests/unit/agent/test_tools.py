"""The tools of agents keep to what their operator allows, whatever tool is called."""

from pathlib import Path

import anyio
import msgspec
import pytest
from mcp.server.mcpserver.exceptions import ToolError

from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.load import load
from lachesis.pipeline.config.policy import ConfigPolicy, FieldRule
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import ConfigError
from lachesis.schemas.notices import Notice
from lachesis.services.agent import server as agent_server
from lachesis.services.agent import tools as agent_tools
from lachesis.services.agent.commands import CommandError, call_command
from lachesis.services.agent.server import HTTP_PATH, make_server, serve_http
from lachesis.services.agent.tools import AgentTools
from lachesis.services.observe.run_state import RunState
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.run.notices_file import NoticesWriter
from lachesis.services.run.supervisor_state import STATE_FILE, ProcessRecord, SupervisorState

pytestmark = pytest.mark.hostile

POLICY = ConfigPolicy(fields={"scoring.raters": FieldRule(locked=True)})


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that were called; none is run."""
    calls: list[tuple[str, ...]] = []

    async def call(*arguments: str, **_: object) -> dict[str, object]:
        calls.append(arguments)
        return {}

    monkeypatch.setattr(agent_tools, "call_command", call)
    return calls


@pytest.fixture
def tools(tmp_path: Path) -> AgentTools:
    file = tmp_path / "run.toml"
    file.write_text(f'run = "r"\nfolder = "{tmp_path}"\n[environments.words]\nkind = "spell_backward"\n')
    (tmp_path / "long.py").write_text(f"from lachesis import Environment\nclass {'X' * 90}(Environment):\n  ''\n")
    return AgentTools(
        file,
        (),
        POLICY,
        [tmp_path],
        lambda _, sets: load(run_config_type(), file=file, sets=sets),
        key_envs={"ALLOWED"},
    )


async def test_a_replay_keeps_the_operators_policy(tools: AgentTools, called: list[tuple[str, ...]]) -> None:
    with pytest.raises(ConfigError, match=r"scoring\.raters.*: locked by the operator's policy"):
        await tools.rl_replay("r", "again", ['scoring.raters=[{rater="/tmp/evil.py:Evil"}]'])
    assert not called
    await tools.rl_replay("r", "again", ["advantage.estimator=rloo"])
    assert [arguments[0] for arguments in called] == ["replay"]


async def test_no_variable_is_sent_to_a_server_but_those_allowed(
    tools: AgentTools, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await tools.rl_select_environment("words")
    for name in ("OTHER", "OPENROUTER_API_KEY", "PATH", ""):
        with pytest.raises(ConfigError, match="allows with --key-env: ALLOWED"):
            await tools.rl_test_inference(models=["m"], server="http://127.0.0.1:1/v1", key_env=name)
    assert not called
    await tools.rl_test_inference(models=["m"], server="http://127.0.0.1:1/v1", key_env="ALLOWED")
    assert "--key-env=ALLOWED" in called[0]


async def test_a_class_with_a_long_name_hides_no_other_environment(tools: AgentTools) -> None:
    names = [one["name"] for one in (await tools.rl_list_environments())["environments"]]
    assert {"words", "X" * 90} <= set(names)


@pytest.mark.parametrize("argument", ["a\0b", "a\ud800b"])
async def test_what_no_process_can_be_given_is_refused_in_words(argument: str) -> None:
    with pytest.raises(CommandError, match="characters that no command can be given"):
        await call_command("rollouts", f"--text={argument}")


@pytest.mark.outside
async def test_half_a_request_holds_no_connection(tools: AgentTools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_server, "_HEAD_S", 0.05)
    ports: list[int] = []
    listening = anyio.Event()

    def started(port: int) -> None:
        ports.append(port)
        listening.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve_http, make_server(tools), "127.0.0.1", 0, "token", started)
        await listening.wait()
        async with await anyio.connect_tcp("127.0.0.1", ports[0]) as slow:
            await slow.send(f"POST {HTTP_PATH} HTTP/1.1\r\nHost: ".encode())
            assert (await slow.receive()).startswith(b"HTTP/1.1 408 ")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_steps": 1 << 70}, "num_steps: it is not from 1 to 100"),
        ({"num_steps": 0}, "num_steps: 0 is not from 1 to 100"),
        ({"group_size": 257}, "group_size: 257 is not from 1 to 256"),
        ({"models": ["m"] * 17}, "models: 17 is not from 1 to 16"),
        (
            {"models": ["m" * 5000], "server": "http://127.0.0.1:1/v1"},
            "a model: 5000 is not from 1 to 4096",
        ),
    ],
)
async def test_a_test_of_inference_is_bounded(
    tools: AgentTools, called: list[tuple[str, ...]], given: dict[str, object], why: str
) -> None:
    await tools.rl_select_environment("words")
    with pytest.raises(ConfigError, match=why):
        await tools.rl_test_inference(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit: it is not from 1"):
        await tools.rl_list_rollouts("r", limit=1 << 70)
    with pytest.raises(ConfigError, match="ratings: 33 is not from 1 to 32"):
        await tools.rl_list_rollouts("r", rating=["a=0:"] * 33)
    with pytest.raises(ConfigError, match="settings: 101 is not from 1 to 100"):
        await tools.rl_replay("r", "again", ["seed=1"] * 101)
    assert not called


async def test_agents_start_no_more_runs_than_the_operator_allows(
    tools: AgentTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = [RunState(run=f"r{i}", folder="/x", state="running" if i else "stopped") for i in range(9)]
    started: list[str] = []

    async def start(config: RunConfig, *_: object, **__: object) -> RunState:
        started.append(config.run)
        return live[1]

    monkeypatch.setattr(agent_tools, "start_run", start)
    monkeypatch.setattr(agent_tools, "look_at_runs", lambda: live)
    await tools.rl_select_environment("words")
    with pytest.raises(StartupError, match=r"8 runs are live on this machine .*, and 8 are the most"):
        await tools.rl_start_training()
    assert not started
    live.pop()
    await tools.rl_start_training()
    assert len(started) == 1


async def test_few_commands_run_at_once_and_calls_beyond_a_bound_are_refused(
    tools: AgentTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most, go = 0, 0, anyio.Event()

    async def call(*_: str, **__: object) -> dict[str, object]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return {}

    monkeypatch.setattr(agent_tools, "call_command", call)
    calls = agent_server._Calls()
    ask = agent_server._explained(tools.rl_health, calls)
    async with anyio.create_task_group() as tasks:
        for _ in range(agent_server._MAX_CALLS):
            tasks.start_soon(ask, "r")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ToolError, match="32 calls have not ended yet"):
            await ask("r")
        go.set()
    assert most == 4
    assert calls.open == 0


async def test_edits_are_bounded_in_number_and_bytes(tools: AgentTools) -> None:
    await tools.rl_select_environment("words")
    with pytest.raises(ConfigError, match=r"513 edits of .* bytes: 512"):
        await tools.rl_edit_config("params", {f"a{i}": i for i in range(513)})
    with pytest.raises(ConfigError, match=r"1 edits of .* bytes in all are the most"):
        await tools.rl_edit_config("params.a", "x" * (128 << 10))
    with pytest.raises(ConfigError, match="seed: the number does not fit into 64 bits"):
        await tools.rl_edit_config("seed", 1 << 70)
    assert not tools._draft.edits


def test_the_status_of_a_run_names_what_stands_in_its_way(tools: AgentTools, tmp_path: Path) -> None:
    state = SupervisorState(process=ProcessRecord.current(), phase="running", ready=1, processes=1)
    (tmp_path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    frozen = Notice(key="silent/1", source="batcher", what="batcher is silent", mend="`kill -CONT 7` lets it go on")
    NoticesWriter(tmp_path).write([frozen])
    overview = look_at_folder("r", tmp_path)
    assert agent_tools._status(overview)["notices"] == ["batcher is silent; to do: `kill -CONT 7` lets it go on"]
