"""`lachesis up`: the supervisor in the foreground, what it started and how far it is, in plain lines."""

import logging
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated

import anyio
import anyio.to_thread
import msgspec
import typer

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.store_reservation import store_budget
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import disk_room
from lachesis.pipeline.common.late_output import keep_output
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.config.evaluation_sources import evaluated_environments, evaluation_names, reason_not_evaluated
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.servers import key_path
from lachesis.pipeline.curriculum.drawn_environments import describe_curriculum
from lachesis.pipeline.errors import HistoryLostError, InfrastructureError
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.evaluator.logic.history import EnvEvaluations, EvaluationHistory
from lachesis.pipeline.evaluator.logic.rates import compare
from lachesis.pipeline.extension import call_each
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, state_of
from lachesis.pipeline.tasks.held_out import MIN_HELD_OUT_TASKS
from lachesis.pipeline.trainer.checkpoint_folder import point_to_best
from lachesis.schemas import keys
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.errors import LachesisError
from lachesis.services.cli.options import Options, with_options
from lachesis.services.observe.evaluations import (
    EvaluationStatus,
    evaluation_line,
    evaluation_rows,
    evaluation_summary,
    evaluation_warnings,
)
from lachesis.services.observe.progress import newest_figures, progress_line
from lachesis.services.observe.run_record import RunSummaryWriter
from lachesis.services.observe.run_watcher import RunWatcher
from lachesis.services.output import human_bytes, printable
from lachesis.services.preflight.first_model import note_model
from lachesis.services.preflight.start import check_start, machine_failures, refuse_failures
from lachesis.services.run.checkpoints import newest_checkpoint
from lachesis.services.run.supervisor_lease import refuse_half_deleted
from lachesis.services.stage_settings import curriculum_settings
from lachesis.services.supervisor.supervisor import Supervisor, has_survivors

__all__ = ["EvaluationWatch", "bring_up", "describe_evaluation", "stop_on_signals", "up"]

log = logging.getLogger("lachesis")

_Recipe = Annotated[
    str | None,
    typer.Option("--recipe", metavar="NAME", help="Named settings of the loss (recipe); `config recipes` lists them."),
]
_PROGRESS_S = 10.0
_LOAD_S = 20.0
"""Seconds for which environments and raters are loaded before the run starts; the services wait for slower ones."""
_FINISH_S = 5.0
"""Seconds that the end of a run waits for the server to say what was evaluated last."""


@with_options
def up(options: Options, recipe: _Recipe = None) -> None:
    """Run everything until Ctrl-C or the last step: the server, unless one is named, and every service."""
    bring_up(options if recipe is None else options.with_set("recipe", recipe))


def bring_up(options: Options) -> None:
    """Run what the options say, as `lachesis up` does."""
    keep_output()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = options.config()
    anyio.run(_up, config, options)


def _describe_room(config: RunConfig) -> str | None:
    """Say how much of the disk the run's own streams may come to take; None: they lie with another server."""
    if config.store is None:
        return None
    free, most = disk_room(config.store).free_bytes, store_budget(config.store, config.streams)
    return (
        f"its streams may come to take {human_bytes(most)} of the disk, where {human_bytes(free)} are free; then old "
        "history makes room for new; streams.*_bytes says how much each may take"
    )


async def _up(config: RunConfig, options: Options) -> None:
    if not has_survivors(config.path):
        await _check(config, options.arguments())
    evaluations, record = EvaluationWatch(config), RunSummaryWriter(config)
    supervisor = Supervisor(config, [evaluations, record, PolicyAddress(config)], file=options.file)
    print(f"run {config.run} in {config.path}; logs in {supervisor.logs}", flush=True)
    if (room := _describe_room(config)) is not None:
        print(room, flush=True)
    if start := record.describe_start():
        print(start, flush=True)
    print(f"watch it from another terminal: {shlex.join(['lachesis', 'top', '--run', config.run])}", flush=True)
    curriculum = describe_curriculum(curriculum_settings(config))
    for line in (describe_evaluation(config), *curriculum, *describe_extensions(config)):
        print(line, flush=True)
    try:
        async with background() as tasks:
            tasks.start_soon(stop_on_signals, supervisor)
            tasks.start_soon(_print_progress, config, evaluations)
            for row in supervisor.running:
                tasks.start_soon(_announce, supervisor, row.planned.name)
            await supervisor.run()
    except LachesisError as error:
        if supervisor.has_begun:  # else the folder may be another supervisor's
            _conclude(config, supervisor, evaluations, record, str(error))
        raise
    if supervisor.has_served:
        _conclude(config, supervisor, evaluations, record, None)
    else:
        print(f"run {config.run} stopped before it had started its services", flush=True)


async def _check(config: RunConfig, arguments: list[str]) -> None:
    """Raise `ConfigError` with all that keeps the run from starting; warn of what may.

    Raises `StartupError` where the run is half deleted: whatever else is missing is missing because of that.
    """
    refuse_half_deleted(config.path, config.run)
    refuse_failures(machine_failures(config))
    findings = [one async for one in check_start(config, arguments, load_s=_LOAD_S)]
    refuse_failures(findings)
    for one in findings:
        if one.level == "WARN":
            log.warning("%s: %s; %s", one.check, one.text, one.mend)


def _conclude(
    config: RunConfig,
    supervisor: Supervisor,
    evaluations: "EvaluationWatch",
    record: RunSummaryWriter,
    reason: str | None,
) -> None:
    """Write down what the run came to, and say where."""
    restarts, notices = supervisor.restarts(), supervisor.notices
    for line in record.conclude(evaluations.rows(), evaluations.events, restarts, reason, notices):
        print(line, flush=True)
    checkpoint = newest_checkpoint(config.path)
    if checkpoint is not None:
        print(f"the trained model: {checkpoint}", flush=True)
    for line in evaluations.conclude():
        print(line, flush=True)


def describe_evaluation(config: RunConfig) -> str:
    """Return what a run evaluates, or why it evaluates nothing and how to have it."""
    reason = reason_not_evaluated(config)
    if reason is not None:
        return f"no held-out evaluation: {reason}"
    names, plan = ", ".join(evaluated_environments(config)), config.evaluate
    if config.evaluation:
        return f"evaluated every {plan.every_steps} steps: {names}"
    return (
        f"held out of training and evaluated every {plan.every_steps} steps: {plan.held_out:.0%} of the tasks of "
        f"{names}, {MIN_HELD_OUT_TASKS} to {plan.items} of each or none (evaluate.held_out)"
    )


def describe_extensions(config: RunConfig) -> list[str]:
    """Return what extensions have to say at the start of this run."""
    return [line for lines in call_each("announce", config) for line in lines]


class EvaluationWatch(RunWatcher):
    """Prints the newest evaluations and those that come, and warns once of a rate that falls."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._reader: EvaluationReader | None = None
        self._warned: set[str] = set()
        self.events: list[EvalEvent] = []
        """All evaluations of the run, in order, without what each answer was."""

    async def follow(self, bus: Bus) -> None:
        """See `RunWatcher`."""
        reader = EvaluationReader(bus, self._config.run, self._config.revision, evaluation_names(self._config))
        before = await reader.catch_up()  # those of earlier lives were printed by them
        self._reader = reader
        self._keep_events(before)
        self._print_evaluation(before[-len(reader.evaluations.envs) :] if before else [])
        async for event in reader.follow():
            self._keep_events([event])
            self._print_evaluation([event])

    async def finish(self, bus: Bus) -> None:
        """See `RunWatcher`."""
        if self._reader is not None:
            with anyio.move_on_after(_FINISH_S), suppress(InfrastructureError, HistoryLostError):
                events = await self._reader.catch_up()
                self._keep_events(events)
                self._print_evaluation(events)

    def _keep_events(self, events: list[EvalEvent]) -> None:
        bare: dict[str, list[int]] = {"tasks": [], "task_successes": [], "task_judged": []}
        self.events += [msgspec.structs.replace(event, **bare) for event in events]

    def _print_evaluation(self, events: list[EvalEvent]) -> None:
        reader = self._reader
        if reader is None:
            return
        for event in events:
            print(evaluation_line(event, reader.evaluations.envs[event.env].first), flush=True)
        warnings = evaluation_warnings(reader.evaluations, self._config.path) if events else {}
        for env, warning in warnings.items():
            if env not in self._warned:
                log.warning("%s", warning)
        self._warned = set(warnings)

    def summaries(self) -> list[str]:
        """Return where each environment stands, in a few words."""
        rows = self.rows()
        return [evaluation_summary(row, named=len(rows) > 1) for row in rows]

    def rows(self) -> list[EvaluationStatus]:
        """Return where each environment stands."""
        return evaluation_rows(self._reader.evaluations) if self._reader is not None else []

    def conclude(self) -> Iterator[str]:
        """Let the best checkpoint be the one by all evaluations, and yield what is to be said of it."""
        evaluations = self._reader.evaluations if self._reader is not None else EvaluationHistory.of()
        if evaluations.best is None or self._config.mode != "train":
            return
        step = evaluations.best.step
        path = point_to_best(self._config.path / CHECKPOINTS, evaluations.best)
        rates = ", ".join(map(_best_rate, evaluations.envs.values()))
        if step == 0:
            yield f"the best by held-out rate: the model begun with, {self._config.model} ({rates})"
        elif path is not None:
            state = state_of(path)
            near = "" if state is not None and state.step == step else f", the nearest to step {step}"
            yield f"the best by held-out rate: {path}{near} ({rates})"


class PolicyAddress(RunWatcher):
    """Prints where the policy's server answers and its key lies, whenever that changes; notes the run's model."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        path = key_path(config, "policy")
        self._key = "" if path is None else f"; its key is in {path}"

    async def follow(self, bus: Bus) -> None:
        """See `RunWatcher`."""
        await anyio.to_thread.run_sync(note_model, self._config)
        async with bus.watch(keys.inference("policy")) as entries:
            async for entry in entries:
                url = printable(entry.value.decode(errors="replace"))
                print(f"the policy answers at {url} (/v1 as OpenAI's servers do, /generate){self._key}", flush=True)

    async def finish(self, bus: Bus) -> None:
        """See `RunWatcher`."""


def _best_rate(env: EnvEvaluations) -> str:
    """Return the rate of the best policy in an environment, beside that of the last on the same tasks."""
    best, newest = env.best or env.newest, env.newest
    change = None if best.policy_version == newest.policy_version else compare(best, newest)
    if change is None:
        return f"{best.env} {best.avg:.2f} on {best.items} tasks"
    on = f" on the same {change.tasks} tasks" if change.tasks else ""
    return f"{best.env} {change.before:.2f}, the last policy {change.after:.2f}{on}"


async def _print_progress(config: RunConfig, evaluations: EvaluationWatch) -> None:
    """Print a line every few seconds while steps are taken."""
    reported = newest_figures(config.path)
    while True:
        await anyio.sleep(_PROGRESS_S)
        figures = await anyio.to_thread.run_sync(newest_figures, config.path)
        if figures != reported and "train/step" in figures:
            before, step = reported.get("train/step", 0.0), figures["train/step"]
            if step < before:
                print(f"the trainer went back from step {before:.0f} to its newest checkpoint", flush=True)
            reported = figures
            print(progress_line(figures, config.training.steps, evaluations.summaries()), flush=True)


async def _announce(supervisor: Supervisor, name: str) -> None:
    row = next(row for row in supervisor.running if row.planned.name == name)
    await row.ready.wait()
    if row.process is not None and not row.stopping:
        print(f"ready: {name}, pid {row.process.pid}, log {supervisor.logs / name}.log", flush=True)


async def stop_on_signals(supervisor: Supervisor) -> None:
    """Stop in order at the first SIGINT, SIGTERM or SIGHUP (the end of the terminal).

    A second SIGINT or SIGTERM stops at once.
    """
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        async for number in signals:
            log.info("%s: stopping; once more to stop without draining", signal.Signals(number).name)
            supervisor.stop()
            break
        async for number in signals:
            if number != signal.SIGHUP:
                log.warning("%s: killing every process", signal.Signals(number).name)
                supervisor.kill()
