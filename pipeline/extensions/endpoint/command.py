"""`lachesis env agent`: tries a program as an agent, on one sample, and shows what came of it."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import anyio
import anyio.to_thread
import msgspec
import typer

from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.run import EnvironmentConfig, InferenceConfig, RunConfig
from lachesis.pipeline.environment.inference_requests import Inference, max_context_of
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.environment.rollout import GroupDraft, collect_group
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.pipeline.evaluator.model_comparison import RequestMeter
from lachesis.pipeline.inference.answered_sample import GeneratedSample
from lachesis.pipeline.inference.protocol import SamplingParams
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.services.cli.local_model import open_local_model
from lachesis.services.cli.options import Json, Options, read_params, with_options
from lachesis.services.output import print_json, print_table, printable

__all__ = ["env_agent"]

_MAX_TEXT = 60
_RANDOM_TOKENS = 400
"""New tokens of an answer where the model is a random one: most end by themselves before."""
_RANDOM_CONTEXT = 1 << 16
"""Tokens of its context; each is a character, and prompts of frameworks are long."""


class AgentCall(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled answer: tokens of its prompt, sampled tokens, how it ended, and its text."""

    prompt: int
    tokens: int
    finish_reason: str
    text: str


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one sample showed. `problem` None: it stands. `agent`: how the program ended, and the end of its output."""

    calls: list[AgentCall]
    problem: str | None = None
    sequences: int = 0
    trained_tokens: int = 0
    rewards: dict[str, float | None] = {}
    agent: dict[str, Any] = {}


@with_options
def env_agent(
    options: Options,
    *,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="The program and its arguments.")
    ] = None,
    function: Annotated[
        str | None, typer.Option(help="A function of Python instead: module:name or path/to/file.py:name.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="An agent of the configuration instead.")] = None,
    prompt: Annotated[str, typer.Option(help="The task's prompt.")] = "Say hello.",
    path: Annotated[Path | None, typer.Option(help="A file of tasks instead of a prompt.")] = None,
    task: Annotated[int, typer.Option(min=0, help="Index of the task.")] = 0,
    params: Annotated[str, typer.Option(help="Further parameters of the environment, a JSON object.")] = "{}",
    model: Annotated[
        str | None, typer.Option(help="Folder or Hugging Face id. Default: the configuration's, else a random one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a program as an agent on one sample, and print its calls, tokens, reward, output and problems.

    It gets the base URLs and keys by which it reaches the model. `lachesis dev` takes a whole group of a configured
    environment through raters to an optimizer step. Exits with 1 if the sample does not stand.
    """
    config = options.config()
    if [bool(command), function is not None, env is not None].count(True) != 1:
        raise ConfigError("name one agent: -- COMMAND, --function PLACE, or --env NAME of the configuration")
    model = model or config.model
    with TemporaryDirectory() as scratch:
        if env is not None:
            settings = _configured(config, env)
        else:
            given: dict[str, Any] = {"command": command} if command else {"function": function}
            if path is not None:
                given["path"] = str(path)
            else:
                given |= {"path": _one_task(Path(scratch), prompt), "task_params": {"answer": ""}}
            settings = EnvironmentConfig(kind="agent", params=given | read_params(params))
        if model is None:
            settings = msgspec.structs.replace(settings, max_new_tokens=_RANDOM_TOKENS)
        report = anyio.run(_try, config, settings, task, model, Path(scratch))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report, model)
    if report.problem is not None:
        raise typer.Exit(1)


def _configured(config: RunConfig, name: str) -> EnvironmentConfig:
    settings = config.environments.get(name)
    if settings is None:
        raise ConfigError(f"environments.{name}: not configured; known: {', '.join(config.environments) or 'none'}")
    if settings.kind != "agent":
        raise ConfigError(f"environments.{name}: its kind is {settings.kind}; try it by lachesis dev {name}")
    return settings


def _one_task(folder: Path, prompt: str) -> str:
    file = folder / "tasks.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n")
    return str(file)


async def _try(
    config: RunConfig, settings: EnvironmentConfig, index: int, model: str | None, scratch: Path
) -> AgentReport:
    env = await anyio.to_thread.run_sync(load_environment, settings.kind, settings.params)
    for doubt in env.doubts:
        print(printable(f"WARNING: {doubt}"), file=sys.stderr)
    if index >= len(env):
        raise ConfigError(f"--task {index}: the environment has the tasks 0 to {len(env) - 1}")
    if model is None:
        model = await anyio.to_thread.run_sync(_random_model, scratch / "model")
    sampling = SamplingParams(
        temperature=settings.temperature, top_p=settings.top_p, max_tokens=settings.max_new_tokens, seed=config.seed
    )
    served = InferenceConfig(chat_template=config.chat_template)
    opening = open_local_model(model, settings.timeout_s, served, exceptions=config.model_exceptions)
    async with opening as inference:
        collect = settings.collect_config(max_context=await max_context_of(inference))
        recorded = _RecordedCalls(inference)
        try:
            async with env.running():
                draft = await collect_group(env, env.task(index), recorded, 1, sampling, config=collect)
        except (EnvironmentCodeError, DataError, InfrastructureError) as error:
            return AgentReport(calls=recorded.calls, problem=without_secrets(str(error)))
    return _report(recorded.calls, draft)


def _random_model(folder: Path) -> str:
    """Return the folder of a new tiny model whose words mean nothing."""
    from lachesis.pipeline.model.policy import build_tiny_policy, save_policy

    save_policy(build_tiny_policy(0, width=32, layers=1, heads=2, max_length=_RANDOM_CONTEXT), folder)
    return str(folder)


def _report(calls: list[AgentCall], draft: GroupDraft) -> AgentReport:
    (session,) = draft.sessions
    return AgentReport(
        calls=calls,
        sequences=len(session.sequences),
        trained_tokens=sum(sum(one.loss_mask) for one in session.sequences),
        rewards=draft.rewards[0],
        agent=session.notes.get("agent", {}),
    )


class _RecordedCalls(RequestMeter):
    """An `Inference` that keeps a summary of each answer of another one."""

    def __init__(self, inference: Inference) -> None:
        super().__init__(inference)
        self.calls: list[AgentCall] = []

    async def generate(
        self, prompt_ids: Sequence[int], n: int, sampling: SamplingParams | None = None
    ) -> list[GeneratedSample]:
        found = await super().generate(prompt_ids, n, sampling)
        self.calls += [
            AgentCall(prompt=len(prompt_ids), tokens=len(one.token_ids), finish_reason=one.finish_reason, text=one.text)
            for one in found
        ]
        return found


def _print(report: AgentReport, model: str | None) -> None:
    if model is None:
        print("no model is given, so a random one answers: its words mean nothing (--model)")
    rows = [
        (number, one.prompt, one.tokens, one.finish_reason, printable(one.text[:_MAX_TEXT]))
        for number, one in enumerate(report.calls)
    ]
    if rows:
        print_table(("call", "prompt tokens", "sampled tokens", "finish", "text"), rows)
    else:
        print("it has not called the model")
    if report.problem is not None:
        print(f"the sample does not stand: {report.problem}")
        return
    said = ", ".join(f"{name} {'unknown' if value is None else f'{value:g}'}" for name, value in report.rewards.items())
    print(f"trained: {report.trained_tokens} tokens in {report.sequences} sequences")
    print(f"reward: {said or 'none was reported; the raters of a run judge it'}")
    if report.agent:
        left = report.agent.get("left")
        print(f"the agent {report.agent['why']} with status {report.agent['status']}")
        if left:
            print(f"it left {left} processes running, which were killed")
        print(f"its output ends:\n{report.agent['output']}" if report.agent["output"] else "it wrote nothing")
