"""Writes `summary.json` and plots into a run's folder when `lachesis up` ends."""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial

import anyio
import msgspec

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.common.disk import DiskShortage, write_if_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import CheckpointError, DamagedError, InfrastructureError, NotFoundError
from lachesis.pipeline.ledger.checkpoint_state import CHECKPOINTS, latest_checkpoint, state_of
from lachesis.pipeline.notices.changes import PastNotice
from lachesis.pipeline.notices.text import notice_lines
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.schemas import subjects
from lachesis.schemas.annotations import EvalEvent
from lachesis.schemas.codec import decode
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import LedgerEntry
from lachesis.schemas.notices import Notice
from lachesis.services.observe.evaluations import EvaluationStatus
from lachesis.services.observe.overview import by_outcome
from lachesis.services.observe.plots import draw_run
from lachesis.services.observe.run_state import SUMMARY_FIELDS, RunState, project
from lachesis.services.observe.run_watcher import RunWatcher
from lachesis.services.observe.summary import PLOTS, SUMMARY_FILE, read_steps, summarize_run
from lachesis.services.run.run_file import run_file_of

__all__ = ["RunSummaryWriter"]

_MIN_DRAWN_STEPS = 10
"""Steps from which on plots are drawn. Fewer make no curve, and drawing takes a second of a core."""
_HEALTH = "health"
_LARGE_STEP = "trainer", "step"

_FINISH_S = 5.0
"""Seconds that the end of a run waits for the server to say what became of the groups."""


class RunSummaryWriter(RunWatcher):
    """Made when a run starts; `conclude` writes what it came to."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._started_s, self._began_s = time.monotonic(), time.time()
        self._first_taken_s: float | None = None
        self._outcomes: dict[str, int] = {}
        self._checkpoint = None
        with suppress(CheckpointError):  # the trainer says so, and how to fix it
            self._checkpoint = latest_checkpoint(config.path / CHECKPOINTS)
        state = state_of(self._checkpoint) if self._checkpoint is not None else None
        self.first_step = state.step if state is not None else 0

    def describe_start(self) -> str | None:
        """Return from which step to which the run trains; None where it trains nothing."""
        if self._config.mode != "train":
            return None
        steps = self._config.training.steps
        to = "until it is stopped" if steps is None else f"to step {steps}"
        if self._checkpoint is None:
            return f"trains from step 0 {to}"
        if steps is not None and self.first_step >= steps:
            return (
                f"resumes at step {self.first_step}, from {self._checkpoint}: all {steps} steps are taken, so nothing "
                "is trained; raise training.steps to go on"
            )
        return f"resumes at step {self.first_step}, from {self._checkpoint}, and trains {to}"

    async def follow(self, bus: Bus) -> None:
        """See `RunWatcher`: note when the first step of this start was taken."""
        async with aclosing(listen_to_heartbeats(bus, self._config.run, "trainer")) as beats:
            async for beat in beats:
                if self._first_taken_s is None and beat.metrics.get("train/step", 0.0) > self.first_step:
                    self._first_taken_s = beat.metrics.get("train/time")

    async def finish(self, bus: Bus) -> None:
        """See `RunWatcher`."""
        ledger = subjects.ledger(self._config.run, self._config.training.name)
        with anyio.move_on_after(_FINISH_S), suppress(InfrastructureError, NotFoundError, DamagedError, SchemaError):
            last = await bus.last(subjects.LEDGER, ledger)
            if last is not None:
                self._outcomes = by_outcome(decode(LedgerEntry, last.data).totals)

    def conclude(
        self,
        evaluations: Sequence[EvaluationStatus],
        events: Sequence[EvalEvent],
        restarts: Mapping[str, int],
        reason: str | None = None,
        notices: Sequence[PastNotice] = (),
    ) -> Iterator[str]:
        """Write summary and plots, and yield what is to be said of them. `reason`: why the run failed.

        A run of fewer than ten steps has no plots, and one that only evaluates has some from its second policy on.
        Nothing is written where the run's folder was deleted under it, or its disk is full: the run ends all the same.
        """
        path, steps = self._config.path, read_steps(self._config.path)
        plots = path / PLOTS
        problem = None
        is_drawn = len(steps) >= _MIN_DRAWN_STEPS or (not steps and len({event.policy_step for event in events}) > 1)
        if is_drawn and path.is_dir():
            try:
                shortage = write_if_room(plots, partial(draw_run, plots, steps, events))
                problem = None if shortage is None else _not_written("no plots", shortage)
            except ImportError as error:
                problem = f"no plots, since matplotlib is missing ({error}): {install_command('plots')}"
        places = {
            "folder": path,
            "config": run_file_of(self._config),
            "metrics": path / METRICS_FILE,
            **({} if problem or not is_drawn else {"plots": plots}),
            "checkpoints": path / CHECKPOINTS,
            "logs": path / "logs",
        }
        summary = summarize_run(
            self._config,
            steps,
            first_step=self.first_step,
            started_s=self._began_s,
            first_taken_s=self._first_taken_s,
            wall_s=time.monotonic() - self._started_s,
            reason=reason,
            outcomes=self._outcomes,
            evaluations=evaluations,
            restarts=restarts,
            places=places,
            notices=notices,
        )
        if not path.is_dir():
            yield _headline(summary)
            return
        file = path / SUMMARY_FILE
        content = msgspec.json.format(msgspec.json.encode(project(summary, SUMMARY_FIELDS))) + b"\n"
        shortage = write_if_room(file, partial(replace_file, file, content))
        yield _headline(summary)
        if shortage is None:
            few = f"; plots are drawn from {_MIN_DRAWN_STEPS} steps on" if steps and not is_drawn else ""
            yield f"summary in {file}" + (f", plots in {plots}" if "plots" in summary.places else few)
        else:
            file.unlink(missing_ok=True)  # one of an earlier end says nothing about this one
            yield _not_written("no summary", shortage)
        if problem is not None:
            yield problem
        still = [one.notice for one in notices if one.until_ns is None]
        yield from (f"in the end: {line}" for line in notice_lines(still, time.time_ns()))
        yield from (f"during the run: {line}" for line in notice_lines(_past_warnings(notices), None))
        if summary.state == "stopped":
            yield f"go on: {shlex.join(['lachesis', 'up', '--run', self._config.run])}"


def _past_warnings(notices: Sequence[PastNotice]) -> list[Notice]:
    """Return what was over before the end, and yet says how the model came about: the last of each kind."""
    still = {(one.notice.source, one.notice.key) for one in notices if one.until_ns is None}
    past = {(one.notice.source, one.notice.key): one.notice for one in notices if one.until_ns is not None}
    return [
        notice
        for (source, key), notice in past.items()
        if (source, key) not in still and (source == _HEALTH or (source, key) == _LARGE_STEP)
    ]


def _not_written(what: str, shortage: DiskShortage) -> str:
    return f"{what} in {shortage.path}: the disk is full, {shortage.lack}"


def _headline(summary: RunState) -> str:
    of = "" if summary.steps is None else f" of {summary.steps}"
    taken = f", from step {summary.first_step} to {summary.step}{of}" if summary.step else ""
    first, last = summary.totals.reward_first, summary.totals.reward_last
    reward = "" if first is None or last is None else f"; reward {first:.3g} at first, {last:.3g} at last"
    first_after = summary.to_first_step_s
    waited = "" if first_after is None else f", the first step after {first_after:.1f} s"
    return f"run {summary.run} {summary.state}{taken} in {summary.wall_s:.0f} s{waited}{reward}"
