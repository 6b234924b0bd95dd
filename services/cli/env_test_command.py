"""`lachesis env test`: asks models for answers to some tasks, and shows a table of the results."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import anyio
import msgspec
import typer
from rich.progress import MofNCompleteColumn, TextColumn

from lachesis.pipeline.common.secrets import without_secrets
from lachesis.pipeline.common.small_files import read_small_text
from lachesis.pipeline.config.run import EnvironmentConfig, RunConfig
from lachesis.pipeline.config.servers import sampling_key
from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.evaluator.logic.model_summary import InferenceSample, ModelSummary, summarize
from lachesis.pipeline.evaluator.model_comparison import InferenceTest, ModelUnderTest
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig, InferenceConfig
from lachesis.pipeline.inference.directory import url_file
from lachesis.pipeline.scorer.config import ScoringConfig
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.local_model import open_local_model
from lachesis.services.cli.options import Json, Options, read_params, with_options
from lachesis.services.cli.progress import bar
from lachesis.services.cli.server_models import ServerTargets, open_server_models
from lachesis.services.output import human_number, human_seconds, print_json, print_table, printable

__all__ = ["env_test"]

_MAX_ERRORS_PER_MODEL = 3


class _Environment(NamedTuple):
    name: str
    settings: EnvironmentConfig
    scoring: ScoringConfig
    chat_template: str | None = None


class _Targets(NamedTuple):
    """Where answers come from. `run`: the configuration of the run whose server is queried."""

    servers: ServerTargets
    folders: list[Path]
    run: RunConfig | None
    role: str
    timeout_s: float
    exceptions: list[str]
    chat_template: str | None
    """Of local models; None: the one beside their tokenizers."""


class InferenceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call of the command, as the JSON file has it."""

    environment: str
    started: str
    steps: int
    samples: int
    settings: dict[str, Any]
    tasks: list[int]
    samples_file: str
    models: list[ModelSummary]


@with_options
def env_test(
    options: Options,
    *,
    kind: Annotated[
        str | None, typer.Argument(help="The environment: MODULE:CLASS, path/to/file.py:CLASS or a built-in one.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="An environment of the configuration instead.")] = None,
    params: Annotated[str, typer.Option(help="Its parameters, a JSON object.")] = "{}",
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
    folder: Annotated[list[Path] | None, typer.Option(help="Folder of a local model. Repeatable.")] = None,
    key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the server's key. OpenRouter: OPENROUTER_API_KEY.")
    ] = None,
    role: Annotated[str, typer.Option(help="Which server of the run (--run) answers.")] = "policy",
    steps: Annotated[int, typer.Option(min=1, help="Tasks.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Answers to each task.")] = 16,
    seed: Annotated[int, typer.Option(help="Draws the tasks.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of one turn.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Samples under way at once.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("inference_tests"),
    as_json: Json = False,
) -> None:
    """Ask models for answers to some tasks before a run, and show a table of what came of them.

    Exits with 1 if a model gave no answer at all.
    """
    chosen = _environment(options, kind, env, params, max_new_tokens)
    if not options.run and not server and not folder and (own := options.config().model) is not None:
        folder = [Path(own)]
    if not options.run and not server and not folder:
        raise ConfigError(
            "no model to ask: the configuration has none; give --run NAME (a run's own server), --folder FOLDER (a "
            "local model), --server URL --model NAME (any OpenAI-compatible server) or --server openrouter"
        )
    run = options.config() if options.run else None
    servers = ServerTargets(server or [], model or [], key_env)
    exceptions = options.config().model_exceptions
    asked = _Targets(
        servers, list(folder or []), run, role, chosen.settings.timeout_s, exceptions, chosen.chat_template
    )
    played = load_environment(chosen.settings.kind, chosen.settings.params)
    for doubt in played.doubts:
        print(printable(f"WARNING: {doubt}"), file=sys.stderr)
    test = InferenceTest(
        played, chosen.settings, chosen.scoring, steps=steps, samples=samples, seed=seed, concurrency=concurrency
    )
    report = anyio.run(_run, test, chosen, asked, out, samples)
    if as_json:
        print_json(report)
    else:
        _print(report, out)
    if any(row.answered == 0 for row in report.models):
        raise typer.Exit(1)


def _environment(
    options: Options, kind: str | None, name: str | None, params: str, max_new_tokens: int | None
) -> _Environment:
    if (kind is None) == (name is None):
        raise ConfigError("name one environment: MODULE:CLASS, or --config FILE --env NAME")
    if kind is not None:
        found = _Environment(kind, EnvironmentConfig(kind=kind, params=read_params(params)), ScoringConfig())
    else:
        config = options.config_with_environments()
        settings = config.environments.get(str(name))
        if settings is None:
            raise ConfigError(f"environments.{name}: not configured; known: {', '.join(config.environments)}")
        if settings.is_foreign:
            raise ConfigError(
                f"environments.{name}: its kind is {settings.kind}, so its rollouts are generated elsewhere"
            )
        found = _Environment(str(name), settings, config.scoring, config.chat_template)
    if max_new_tokens is None:
        return found
    return found._replace(settings=msgspec.structs.replace(found.settings, max_new_tokens=max_new_tokens))


async def _run(test: InferenceTest, chosen: _Environment, asked: _Targets, out: Path, samples: int) -> InferenceReport:
    started = datetime.now(UTC)
    label = "".join(c if c.isalnum() or c in "-_" else "_" for c in chosen.name).strip("_")
    stem = out / f"{label}-{started:%Y%m%dT%H%M%S-%f}"
    async with _open_models(asked) as models:
        await anyio.to_thread.run_sync(lambda: out.mkdir(parents=True, exist_ok=True))
        with stem.with_suffix(".jsonl").open("x", encoding="utf-8") as lines:
            rows = [await _one_model(test, model, lines, len(test.indices) * samples) for model in models]
    report = InferenceReport(
        environment=chosen.name,
        started=started.isoformat(),
        steps=len(test.indices),
        samples=samples,
        settings=msgspec.to_builtins(chosen.settings),
        tasks=test.indices,
        samples_file=stem.with_suffix(".jsonl").name,
        models=rows,
    )
    text = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    await anyio.Path(stem.with_suffix(".json")).write_bytes(text)
    return report


async def _one_model(test: InferenceTest, model: ModelUnderTest, lines: Any, total: int) -> ModelSummary:
    done = 0
    with bar(model.name, MofNCompleteColumn(), TextColumn("samples")) as progress:
        progress(0, total)

        def keep(sample: InferenceSample) -> None:
            nonlocal done
            lines.write(msgspec.json.encode(sample).decode() + "\n")
            lines.flush()
            done += 1
            progress(done, total)

        return summarize(model.name, await test.run(model, keep))


@asynccontextmanager
async def _open_models(asked: _Targets) -> AsyncIterator[list[ModelUnderTest]]:
    async with AsyncExitStack() as stack:
        models = []
        others = asked.run is not None or bool(asked.folders)
        servers = await stack.enter_async_context(
            open_server_models(asked.servers, asked.timeout_s, beside_others=others)
        )
        if asked.run is not None:
            models.append(await stack.enter_async_context(_open_run(asked.run, asked.role, asked.timeout_s)))
        for folder in asked.folders:
            settings = InferenceConfig(chat_template=asked.chat_template)
            client = await stack.enter_async_context(
                open_local_model(str(folder), asked.timeout_s, settings, exceptions=asked.exceptions)
            )
            models.append(ModelUnderTest(str(folder), partial(_same, client)))
        yield [*models, *servers]


@asynccontextmanager
async def _open_run(config: RunConfig, role: str, timeout_s: float) -> AsyncIterator[ModelUnderTest]:
    file = url_file(config.path, role)
    try:
        url = read_small_text(file).strip()
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; it holds the address of the run's {role} server once `lachesis up` runs"
        ) from error
    key = sampling_key(config, role)
    async with InferenceClient(ClientConfig(url=url, timeout=timeout_s), token=key) as client:
        yield ModelUnderTest(f"{config.run}/{role}", partial(_same, client))


def _same(client: InferenceClient) -> InferenceClient:
    return client


def _print(report: InferenceReport, out: Path) -> None:
    print(f"{report.environment}: {report.steps} tasks x {report.samples} samples")
    header = (
        "model", "answers", "failed", "parsed", "reward", "spread", "flat groups", "tokens", "cut", "p50", "max",
    )  # fmt: skip
    print_table(header, (_row(model) for model in report.models))
    for model in report.models:
        for text, count in sorted(model.errors.items(), key=lambda pair: -pair[1])[:_MAX_ERRORS_PER_MODEL]:
            print(f"{model.model}: {count} x {' '.join(without_secrets(text).split())}")
    print(f"results: {out / report.samples_file.removesuffix('l')}, what the models said: {out / report.samples_file}")


def _row(model: ModelSummary) -> tuple[Any, ...]:
    bad = {name: count for name, count in model.outcomes.items() if name not in ("scored", "unscored")}
    return (
        model.model,
        f"{model.answered}/{model.samples}",
        ", ".join(f"{count} {name}" for name, count in sorted(bad.items())) or "0",
        _percent(model.parse_rate),
        human_number(model.reward_mean),
        human_number(model.reward_std),
        _percent(model.flat_groups),
        human_number(model.tokens_mean),
        _percent(model.cut),
        human_seconds(model.latency_p50_s),
        human_seconds(model.latency_max_s),
    )


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"
