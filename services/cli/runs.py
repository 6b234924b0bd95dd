"""`lachesis runs`: runs of this machine, started in the background, listed, stopped, read and deleted."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

import anyio
import typer

from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.notices.text import notice_lines
from lachesis.schemas.errors import ConfigError
from lachesis.services.cli.delete import delete
from lachesis.services.cli.options import Json, Options, with_options
from lachesis.services.cli.recover import recover
from lachesis.services.observe.evaluations import evaluation_summary
from lachesis.services.observe.rewards import describe_rewards
from lachesis.services.observe.run_logs import follow_logs, log_files, newest_lines
from lachesis.services.observe.run_results import printed_results, results_of
from lachesis.services.observe.run_state import FOLDER_FIELDS, RunState, project
from lachesis.services.observe.runs import look_at_folder, look_at_runs
from lachesis.services.output import human_number, human_seconds, print_json, print_table, printable
from lachesis.services.supervisor.detached import start_run, stop_run
from lachesis.services.supervisor.supervisor_keeper import keep_detached

__all__ = ["runs_app"]

runs_app = typer.Typer(help="Runs of this machine.", no_args_is_help=True)
runs_app.command("delete")(delete)
runs_app.command("recover")(recover)

_Name = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of the run, same as --run.")]


@runs_app.command("list")
def runs_list(as_json: Json = False) -> None:
    """List the runs that were started on this machine, the newest first. No server is queried."""
    found = look_at_runs()
    if as_json:
        print_json([project(one, FOLDER_FIELDS) for one in found])
        return
    print_table(
        ("run", "state", "step", "reward", "held out", "started", "folder"),
        (
            (one.run, one.state, _step(one), human_number(one.reward), _held_out(one), _when(one), one.folder)
            for one in found
        ),
    )


@runs_app.command("show")
@with_options
def runs_show(options: Options, run: _Name = None, *, as_json: Json = False) -> None:
    """Show one run: state, processes, newest figures, and where its files are. No server is queried."""
    config = _named(options, run)
    found = look_at_folder(config.run, config.path)
    if as_json:
        print_json(project(found, FOLDER_FIELDS))
        return
    _show(found)


@runs_app.command("start")
@with_options
def runs_start(
    options: Options,
    run: _Name = None,
    *,
    wait: Annotated[bool, typer.Option(help="Return once every process is ready, not as soon as it begins.")] = True,
    as_json: Json = False,
) -> None:
    """Start a run, or go on with it, in the background: it outlives this terminal.

    If something kills its supervisor, that is started again. Exits with 2 and what the run said if it ends before it is
    ready.
    """
    options = options if run is None else replace(options, run=run)
    config = options.config_with_environments()
    started = time.monotonic()
    found = anyio.run(_start, config, options, wait)
    if as_json:
        print_json(project(found, FOLDER_FIELDS))
        return
    count = "" if found.processes is None else f" {found.ready} of {found.processes} processes ready"
    print(printable(f"run {found.run} is {found.state}:{count} after {time.monotonic() - started:.1f} s"))
    print(printable(f"its folder: {found.folder}"))
    print(printable(f"watch it: lachesis top --run {found.run}; end it: lachesis runs stop {found.run}"))


async def _start(config: RunConfig, options: Options, wait: bool) -> RunState:
    return await start_run(config, options.arguments(), _print_progress, wait=wait)


@runs_app.command("stop")
@with_options
def runs_stop(
    options: Options,
    run: _Name = None,
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill every process; what they held is handled again.")] = False,
    as_json: Json = False,
) -> None:
    """Stop a run in order, wherever it was started: every service drains, and the next start goes on."""
    config = _named(options, run)
    found = anyio.run(_stop, config, now)
    if as_json:
        print_json(project(found, FOLDER_FIELDS))
        return
    at = "" if found.step is None else f" at step {_step(found)}"
    print(f"run {found.run} is {found.state}{at}; go on with it: lachesis runs start {found.run}")


async def _stop(config: RunConfig, now: bool) -> RunState:
    return await stop_run(config.run, config.path, _print_progress, now=now)


@runs_app.command("results")
def runs_results(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Names of runs; several are put side by side.")],
    as_json: Json = False,
) -> None:
    """Show the results of runs: rewards, held-out rates, outcomes, and where the trained model is."""
    found = [results_of(_named(Options(), name)) for name in runs]
    if as_json:
        print_json([printed_results(one) for one in found])
        return
    _print_results(found)


@runs_app.command("logs")
@with_options
def runs_logs(
    options: Options,
    run: _Name = None,
    *,
    process: Annotated[
        list[str] | None, typer.Option("--process", "-p", help="Only the log of this process. Repeatable.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends, or Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Newest lines of each log to begin with.")] = 20,
) -> None:
    """Print the newest lines of the logs of a run's processes, each with the name of its process."""
    config = _named(options, run)
    files = log_files(config.path, process or ())
    if not files:
        known = ", ".join(log_files(config.path)) or "none"
        raise ConfigError(f"run {config.run} has no log of {', '.join(process or ['any process'])}; logs: {known}")
    for name, file in files.items():
        for line in newest_lines(file, lines):
            print(printable(f"{name}: {line}"))
    if follow:
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            anyio.run(_follow, config, tuple(process or ()))


async def _follow(config: RunConfig, processes: Sequence[str]) -> None:
    async for name, line in follow_logs(config.run, config.path, processes):
        print(printable(f"{name}: {line}"), flush=True)


@runs_app.command("keep", hidden=True)
@with_options
def runs_keep(options: Options) -> None:
    """Start the supervisor of a run whenever something kills it, until it ends by itself."""
    raise typer.Exit(anyio.run(keep_detached, options.config(), options.arguments()))


def _named(options: Options, run: str | None) -> RunConfig:
    """Return the configuration of the run that is named. Raises `ConfigError` where there is none."""
    options = options if run is None else replace(options, run=run)
    config = options.config()
    if not options.names_run:
        raise ConfigError("say which run: `lachesis runs list` shows them")
    if not config.path.is_dir():
        raise ConfigError(
            f"there is no run {config.run}: no folder {config.path}; lachesis runs list shows those there are"
        )
    return config


def _print_progress(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _show(found: RunState) -> None:
    pid = "" if found.supervisor is None else f", supervisor pid {found.supervisor}"
    count = (
        "" if found.processes is None or not found.is_live else f", {found.ready} of {found.processes} processes ready"
    )
    print(printable(f"run {found.run} is {found.state}{pid}{count}"))
    for line in notice_lines(found.notices, time.time_ns()):
        print(printable(f"{'notice':9} {line}"))
    facts = {
        "problem": found.problem,
        "step": None if found.step is None else _step(found),
        "reward": describe_rewards(found.reward, found.rewards) or None,
        "held out": "; ".join(evaluation_summary(row) for row in found.evaluations) or None,
        "stopped": ", ".join([*found.quarantined, *found.halted])
        and f"{', '.join([*found.quarantined, *found.halted])} by health checks: lachesis health --run {found.run}",
        "staleness": human_number(found.staleness),
        "p99": human_seconds(found.end_to_end.p99),
        "started": _when(found),
        "folder": found.folder,
        "config": found.config,
        "logs": found.logs,
        "trackers": found.trackers,
        "down": ", ".join(sorted(name for name, pid in found.pids.items() if pid is None)) if found.is_live else None,
    }
    for name, text in facts.items():
        if text:
            print(printable(f"{name:9} {text}"))


def _print_results(found: Sequence[RunState]) -> None:
    names = [name for one in found for name in one.totals.held_out]
    rows: list[tuple[str, list[str | None]]] = [
        ("state", [one.state for one in found]),
        ("step", [f"{one.step}{'' if one.steps is None else f'/{one.steps}'}" for one in found]),
        ("sequences", [str(one.totals.sequences) for one in found]),
        ("reward first", [human_number(one.totals.reward_first) for one in found]),
        ("reward last", [human_number(one.totals.reward_last) for one in found]),
    ]
    for name in dict.fromkeys(names):
        for what in ("first", "last", "best"):
            rates = [one.totals.held_out.get(name) for one in found]
            cells = [None if one is None else human_number(getattr(one, what)) for one in rates]
            rows.append((f"held out {name}, {what}", cells))
    rows += [
        ("staleness", [human_number(one.totals.staleness_mean) for one in found]),
        ("e2e p99", [human_seconds(one.end_to_end.p99) for one in found]),
        ("model", [one.places.get("checkpoint") for one in found]),
        ("plots", [one.places.get("plots") for one in found]),
        ("folder", [one.folder for one in found]),
    ]
    print_table(("", *(one.run for one in found)), ((name, *cells) for name, cells in rows if any(cells)))
    for one in found:
        if one.problem:
            print(printable(f"{one.run} failed: {one.problem}"))


def _step(one: RunState) -> str | None:
    return None if one.step is None else f"{one.step}{'' if one.steps is None else f'/{one.steps}'}"


def _held_out(one: RunState) -> str | None:
    return ", ".join(f"{row.env} {row.rate:.2f}" for row in one.evaluations) or None


def _when(one: RunState) -> str | None:
    if one.started_ns is None:
        return None
    return datetime.fromtimestamp(one.started_ns / 1e9, UTC).astimezone().isoformat(" ", "seconds")
