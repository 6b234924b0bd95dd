"""`lachesis eval`: measures checkpoints and models of servers on a run's held-out tasks, side by side.

Tasks, sampling and judgement are those of the run's own evaluator (`EvaluatedEnv`), so the rates can be compared with
those that the run recorded.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import anyio
import msgspec
import typer

from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.config.evaluation_sources import reason_not_evaluated
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.environment.held_out import kept_record
from lachesis.pipeline.environment.inference_requests import Inference
from lachesis.pipeline.environment.rollout import GroupDraft
from lachesis.pipeline.evaluator.evaluate import EvalResult
from lachesis.pipeline.evaluator.evaluated_env import EvaluatedEnv, load_evaluated_env
from lachesis.pipeline.evaluator.logic.rates import Difference, TaskResult, compare_tasks, pass_at_k, rate_interval
from lachesis.pipeline.evaluator.model_comparison import RequestMeter
from lachesis.schemas.errors import ConfigError, LachesisError
from lachesis.services.cli.local_model import open_local_model
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.cli.server_models import ServerTargets, open_server_models
from lachesis.services.observe.evaluations import with_interval
from lachesis.services.output import human_number, human_seconds, print_json, print_table, printable
from lachesis.services.run.checkpoints import find_checkpoint, names_checkpoint
from lachesis.services.stage_settings import evaluated_settings

__all__ = ["EvaluationReport", "ModelEvaluation", "eval_"]

_MAX_ERROR_CHARS = 300
_MAX_ERRORS_PER_MODEL = 3
_MAX_DISTINCT_ERRORS = 100
"""Different texts of errors that are counted apart; the others are counted together."""


class ModelEvaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one environment. Rates are fractions from 0 to 1, None where nothing could be scored."""

    model: str
    path: str | None
    """Folder or id of a local model; None for a model of a server."""
    environment: str
    tasks: int
    samples: int
    """Sampled answers to each task, k; the answers at temperature 0 are not among them."""
    temperature: float
    avg: float | None
    """Share of the scored answers that succeeded."""
    error: float | None
    """Standard error of `avg`, with tasks as the unit of chance."""
    interval: tuple[float, float] | None
    """Bounds of the 95 % interval of `avg`."""
    pass_at: dict[str, float | None]
    """For k = 1, 2, 4... the unbiased estimate from the tasks with k scored answers or more; for k = `samples` the
    share of the tasks with a success, of those where that is known, as the run's own evaluations have it."""
    greedy: float | None
    answers: int
    """Answers that came, those at temperature 0 included."""
    unjudged: int
    """Answers without a score, those that never came included."""
    failed: int
    """Groups of answers that failed or were refused, or could not be scored."""
    errors: dict[str, int]
    """What these said, with their number."""
    tokens: int | None
    """Generated tokens; None where the server does not count them."""
    seconds: float
    difference: Difference | None
    """From the first model, on the tasks that were scored for both; None for the first one."""
    results: dict[str, TaskResult]
    """Successes and scored answers of each task, by its index."""


class EvaluationReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call, as `--json` and `--out` have it."""

    run: str
    seed: int
    started: str
    evaluations: list[ModelEvaluation]


class _LocalModel(NamedTuple):
    """A checkpoint or another model that is loaded here; `name` is how it was called."""

    name: str
    source: str


class _Targets(NamedTuple):
    local: Sequence[_LocalModel]
    servers: ServerTargets


class _Plan(NamedTuple):
    """`items` and `samples`: those of the command line, None for those of the configuration."""

    config: RunConfig
    items: int | None
    samples: int | None


class _Model(NamedTuple):
    name: str
    inference: Inference
    path: str | None


@with_options
def eval_(
    options: Options,
    checkpoint: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folder of a checkpoint or model, or a Hugging Face id; of the run also best, newest or a step. "
            "Several are put side by side."
        ),
    ] = None,
    *,
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Only this environment of those that are evaluated. Repeatable.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="Text-only server with OpenAI's /chat/completions: its URL up to /v1, or `openrouter`. Repeatable."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model to ask the server for; with several servers, one for each. Repeatable."),
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key. OpenRouter: OPENROUTER_API_KEY.")
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Most tasks of an environment. Default: evaluate.items.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Sampled answers to each task. Default: evaluate.samples.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results as JSON to this file, too.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate checkpoints, or models of a server, on the held-out tasks of a run.

    Tasks, sampling and judgement are those of the run's own evaluations; each later model is compared with the first,
    task by task. Exits with 1 if a model gave no answer.
    """
    config = options.config_with_environments()
    local = [_find(config, name) for name in checkpoint or ()]
    if not local and not server:
        raise ConfigError(
            "no model to evaluate: name a folder (with --run also best, newest or a step), or give --server URL "
            "--model NAME"
        )
    envs = _load(config, env or [])
    asked = _Targets(local, ServerTargets(server or [], model or [], key_env))
    report = anyio.run(_run, config, envs, asked, items, samples)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if as_json:
        print_json(report)
    else:
        _print(report)
    if not all(one.answers for one in report.evaluations):
        raise typer.Exit(1)


def _find(config: RunConfig, name: str) -> _LocalModel:
    if names_checkpoint(name) and not Path(name).is_dir():
        path = find_checkpoint(config.path, name)
        return _LocalModel(name if name == path.name else f"{name} ({path.name})", str(path))
    return _LocalModel(name, name)


def _load(config: RunConfig, names: Sequence[str]) -> list[EvaluatedEnv]:
    """Return the environments that are evaluated, each with tasks. Raises ConfigError if there is none."""
    there = evaluated_settings(config)
    if not there:
        raise ConfigError(f"run {config.run} has no held-out tasks: {reason_not_evaluated(config)}")
    if unknown := [name for name in names if name not in there]:
        raise ConfigError(f"--env {unknown[0]}: not evaluated by run {config.run}; it evaluates {', '.join(there)}")
    loaded = [load_evaluated_env(there[name], name, kept_record(config.path, name)) for name in (names or there)]
    reasons = [reason for one in loaded if (reason := one.reason_without_tasks()) is not None]
    if (names and reasons) or len(reasons) == len(loaded):
        raise ConfigError("; ".join(reasons))
    for reason in reasons:
        print(printable(f"lachesis: {reason}"), file=sys.stderr)
    return [one for one in loaded if one.tasks]


async def _run(
    config: RunConfig, envs: Sequence[EvaluatedEnv], asked: _Targets, items: int | None, samples: int | None
) -> EvaluationReport:
    started = datetime.now(UTC)
    timeout_s = max(one.settings.timeout_s for one in envs)
    plan = _Plan(config, items, samples)
    rows: list[ModelEvaluation] = []
    first: dict[str, EvalResult] = {}

    async def add(model: _Model) -> None:
        for one in envs:
            row, result = await _measure(plan, one, model, first.get(one.name))
            first.setdefault(one.name, result)
            rows.append(row)

    async with open_server_models(asked.servers, timeout_s, beside_others=bool(asked.local)) as others:
        for local in asked.local:
            settings = msgspec.structs.replace(config.role("eval"), chat_template=config.chat_template_of("eval"))
            async with open_local_model(
                local.source, timeout_s, settings, exceptions=config.model_exceptions
            ) as client:
                await add(_Model(local.name, client, local.source))
        for other in others:
            await add(_Model(other.name, other.connect(), None))
    return EvaluationReport(run=config.run, seed=config.seed, started=started.isoformat(), evaluations=rows)


async def _measure(
    plan: _Plan, one: EvaluatedEnv, model: _Model, first: EvalResult | None
) -> tuple[ModelEvaluation, EvalResult]:
    """Measure one model on one environment, and compare it with the `first` one's result."""
    most = min(plan.items or plan.config.evaluate.items, len(one.tasks))
    meter, errors, done = RequestMeter(model.inference), Counter[str](), 0
    began_s = time.monotonic()
    with bar(f"{model.name}, {one.name}") as progress:
        progress(0, 2 * most)

        def count() -> None:
            nonlocal done
            done += 1
            progress(done, 2 * most)  # of each task a group of samples, and one of the greedy answer

        def skip(_: int, error: LachesisError) -> None:
            text = " ".join(without_secrets(str(error))[:_MAX_ERROR_CHARS].split())
            errors[text if text in errors or len(errors) < _MAX_DISTINCT_ERRORS else "other errors"] += 1
            count()

        async def score_group(draft: GroupDraft) -> Sequence[float | None]:
            scores = await one.score_group(draft)
            count()
            return scores

        result = await replace(one, score_group=score_group).measure(meter, items=most, samples=plan.samples, skip=skip)
    row = ModelEvaluation(
        model=model.name,
        path=model.path,
        environment=one.name,
        tasks=result.items,
        samples=result.k,
        temperature=result.temperature,
        avg=result.avg_at_k,
        error=result.error,
        interval=rate_interval(list(result.tasks.values())),
        pass_at=_pass_at(result),
        greedy=result.greedy,
        answers=sum(result.versions.values()),
        unjudged=result.unjudged,
        failed=errors.total(),
        errors=dict(errors.most_common()),
        tokens=meter.tokens,
        seconds=time.monotonic() - began_s,
        difference=None if first is None else compare_tasks(first.tasks, result.tasks),
        results={str(task): counts for task, counts in result.tasks.items()},
    )
    return row, result


def _pass_at(result: EvalResult) -> dict[str, float | None]:
    """Return pass@k for the powers of two below the number of samples, and for that number."""
    results = list(result.tasks.values())
    below = [2**power for power in range((result.k - 1).bit_length())]
    return {str(k): pass_at_k(results, k) for k in below} | {str(result.k): result.pass_at_k}


def _print(report: EvaluationReport) -> None:
    k = report.evaluations[0].samples
    several = len(report.evaluations) > len({one.environment for one in report.evaluations})
    header = ["model", "environment", "tasks", f"avg@{k}", f"pass@{k}", "greedy", "unjudged", "tokens", "time"]
    print_table([*header, *(["from the first"] if several else [])], (_row(one, several) for one in report.evaluations))
    for one in report.evaluations:
        for text, count in list(one.errors.items())[:_MAX_ERRORS_PER_MODEL]:
            print(printable(f"{one.model}, {one.environment}: {count} x {text}"))


def _row(one: ModelEvaluation, several: bool) -> list[Any]:
    row = [
        one.model, one.environment, one.tasks, None if one.avg is None else with_interval(one.avg, one.interval, 3),
        human_number(one.pass_at[str(one.samples)]), human_number(one.greedy), one.unjudged, one.tokens,
        human_seconds(one.seconds),
    ]  # fmt: skip
    if several:
        change = one.difference
        row.append(None if change is None else f"{change.value:+.3f} +- {change.error:.3f}")
    return row
