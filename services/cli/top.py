"""`lachesis top`: shows a live run, redrawn once a second, or once as text or JSON.

Reads heartbeats, evaluations, the server's information on durable consumers, and, from the run's folder, its
supervisor's notices and its figures. Writes nothing.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import aclosing, suppress
from typing import Annotated

import anyio
import msgspec
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.evaluation_sources import evaluation_names
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError
from lachesis.pipeline.evaluator.evaluation_reader import EvaluationReader
from lachesis.pipeline.notices.text import notice_lines
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.schemas import subjects
from lachesis.schemas.ledger import LedgerEntry
from lachesis.services.cli.columns import FULL_DETAIL, TableColumn, fitting, table
from lachesis.services.cli.ending import end_on_signal
from lachesis.services.cli.last_notices import showing_last_notices
from lachesis.services.cli.options import Options, with_options
from lachesis.services.observe.evaluations import (
    EvaluationStatus,
    evaluation_rows,
    evaluation_summary,
    evaluation_warnings,
)
from lachesis.services.observe.lost_generation import describe_lost_generation
from lachesis.services.observe.notices import NoticeWatch
from lachesis.services.observe.overview import RewardCurve, finished, look_back, overview_at
from lachesis.services.observe.progress import recent_figures
from lachesis.services.observe.rewards import describe_rewards
from lachesis.services.observe.run_state import TOP_FIELDS, RunState, project
from lachesis.services.observe.services import Quantiles
from lachesis.services.observe.window import Recent, StageRow
from lachesis.services.output import SafeConsole, human_number, human_seconds, print_json, printable
from lachesis.services.planned_processes import planned_services
from lachesis.services.run.connect import CONNECT_S, check_known, has_ended, open_run, other_runs, until_ended

__all__ = ["render", "top"]

_REDRAW_S = 1.0
_REACH_S = 2.0
"""Seconds to find the run's server, for a command that people type."""
_PLAIN_WIDTH = 200
_STYLES = {"ok": "green", "backpressure": "yellow", "waiting": "red", "stale": "red", "silent": "red"}
_BARS = "▁▂▃▄▅▆▇█"
_COLUMN_TEXTS = {
    "load": "share of the time at work, near 100 % it cannot go faster",
    "lag": "still to pass the stage (trainer: batches)",
    "trend": "growth of the lag",
    "held": "in the stage",
    "unacked": "delivered to it and not done",
    "wait": "from stored to start of handling",
    "process": "from start of handling to done",
    "again": "delivered more than once",
    "dead": "given up",
    "n": "processes",
}
_STATES = "backpressure: waits until the run has room, a consequence of what is slow; e2e: from task to optimizer step"
_TREND = 0.2
"""Messages a second from which a lag counts as growing or shrinking."""


@with_options
def top(
    options: Options,
    *,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as JSON.")] = False,
    window: Annotated[float, typer.Option(min=2, help="Window of rates and percentiles in seconds.")] = 15.0,
) -> None:
    """Watch the run: lag, rate and latency of each stage, and the bottleneck. Ends with Ctrl-C."""
    config = options.config()
    with showing_last_notices(config, on_stderr=as_json):
        overview = anyio.run(_top, config, once or as_json or not sys.stdout.isatty(), window)
    if overview is None:
        return
    if as_json:
        print_json(project(overview, TOP_FIELDS))
    else:
        terminal = sys.stdout.isatty()
        console = SafeConsole(width=None if terminal else _PLAIN_WIDTH)
        console.print(render(overview, console.width))


async def _top(config: RunConfig, once: bool, window_s: float) -> RunState | None:
    """Return what was seen last, None if ended by a signal."""
    watch = _TopScreen(config, window_s)
    seen: RunState | None = None
    async with background() as watching:
        watching.start_soon(end_on_signal, watching.cancel_scope)
        name = f"{config.run}.top"
        async with open_run(config, name, connect_s=_REACH_S, needs_jetstream=False) as (bus, ended):
            watch.bus = bus
            others: list[str] = []
            with anyio.move_on_after(CONNECT_S):  # later than that the server stands still, which is shown
                if ended or await has_ended(bus, config):
                    return await _last_look(bus, config)
                others = await other_runs(bus, config)
            await check_known(bus, config.run, others)
            async with background() as tasks:
                tasks.start_soon(watch.follow_heartbeats, bus)
                tasks.start_soon(watch.follow_consumers, bus)
                tasks.start_soon(watch.follow_evaluations, bus)
                if once:
                    await anyio.sleep(window_s)
                else:
                    tasks.start_soon(watch.draw)
                    await until_ended(bus, config)
                seen = watch.refresh()
    return seen


async def _last_look(bus: Bus, config: RunConfig) -> RunState:
    run, trainer = config.run, config.training.name
    subject = subjects.ledger(run, trainer)
    last, _, _ = await read_last_event(
        bus, subjects.LEDGER, subject, LedgerEntry, lambda one: (one.run, one.trainer) == (run, trainer)
    )
    outcomes = last.totals if last else {}
    reader = EvaluationReader(bus, config.run, config.revision, evaluation_names(config))
    await reader.catch_up()
    overview = look_back(config.run, planned_services(config), recent_figures(config.path), outcomes)
    fallen = evaluation_warnings(reader.evaluations, config.path).values()
    return msgspec.structs.replace(overview, evaluations=evaluation_rows(reader.evaluations), warnings=list(fallen))


class _TopScreen:
    def __init__(self, config: RunConfig, window_s: float) -> None:
        self.config = config
        self.recent = Recent(window_s, planned_services(config))
        self.rewards = RewardCurve()
        self.notices = NoticeWatch(config)
        self.bus: Bus | None = None
        self._evaluations: list[EvaluationStatus] = []
        self._fallen: list[str] = []
        self._step = 0

    def refresh(self) -> RunState:
        url = self.config.telemetry.jaeger_url
        overview = overview_at(self.config.run, self.recent, self.rewards, time.monotonic(), jaeger_url=url)
        stall = self.bus.stall if self.bus is not None else None
        self.notices.report_server(None if stall is None else str(stall))
        notices = self.notices.notices(time.monotonic())
        self._step = max(self._step, overview.step or 0)
        steps = self.config.training.steps
        if steps is not None and self._step >= steps:
            overview = finished(overview)
        return msgspec.structs.replace(overview, evaluations=self._evaluations, warnings=self._fallen, notices=notices)

    async def draw(self) -> None:
        """Redraw for ever, on a screen of its own."""
        with Live(screen=True, auto_refresh=False, console=SafeConsole()) as live:
            while True:
                live.update(render(self.refresh(), live.console.width), refresh=True)
                await anyio.sleep(_REDRAW_S)

    async def follow_heartbeats(self, bus: Bus) -> None:
        async with aclosing(listen_to_heartbeats(bus, self.config.run)) as beats:
            async for beat in beats:
                self.recent.heartbeat(beat, time.monotonic())
                self.notices.hear(beat, time.monotonic())
                self.rewards.record_step(beat.metrics)

    async def follow_evaluations(self, bus: Bus) -> None:
        """Keep the newest evaluations. A run without streams has none yet."""
        reader = EvaluationReader(bus, self.config.run, self.config.revision, evaluation_names(self.config))
        while True:
            with suppress(NotFoundError):
                async with aclosing(reader.follow()) as events:
                    async for _ in events:
                        self._evaluations = evaluation_rows(reader.evaluations)
                        self._fallen = list(evaluation_warnings(reader.evaluations, self.config.path).values())
            await anyio.sleep(1.0)

    async def follow_consumers(self, bus: Bus) -> None:
        """Query once a second how far the competing consumers are. An unknown consumer has no members yet."""
        while True:
            for stage in ("scorer", "teacher"):
                durable = subjects.durable(stage, self.config.run, self.config.revision)
                try:
                    lag = await bus.lag(subjects.ROLLOUTS, durable)
                except (NotFoundError, InfrastructureError):
                    continue
                self.recent.consumer(stage, lag, time.monotonic())
            await anyio.sleep(1.0)


def render(overview: RunState, width: int = _PLAIN_WIDTH) -> RenderableType:
    """Return what is shown of a run in `width` characters."""
    columns = fitting(_columns(overview), width)
    slowest = overview.bottleneck.service if overview.bottleneck else None
    styles = ["bold reverse" if row.service == slowest else "" for row in overview.stages]
    legend = _legend(overview, {column.name.partition(" ")[0] for column in columns})
    return Group(*_header(overview), Text(), table(columns, styles), Text(), *_footer(overview), legend)


def _header(overview: RunState) -> Iterator[Text]:
    yield Text.assemble(
        (f"run {overview.run}", "bold"),
        ("   ENDED: how it stood then" if overview.ended else "", "bold red"),
        f"   step {_count(overview.step)}   {_number(overview.s_per_step)} s/step   ",
        f"staleness {_number(overview.staleness)} mean, {_number(overview.staleness_max)} max, "
        f"{_number(overview.staleness_bound)} allowed   e2e p99 {human_seconds(overview.e2e_p99_s) or '-'}",
    )
    under_way = (
        ""
        if overview.outstanding is None
        else (f"under way {_number(overview.outstanding)} of {_number(overview.capacity)} sequences   ")
    )
    trend = "" if overview.reward_trend is None else f" {overview.reward_trend:+.2g} a step"
    yield Text(
        f"{_number(overview.groups_per_s)} groups/s   {_number(overview.tokens_per_s)} tokens/s   "
        f"{under_way}reward {_number(overview.reward)}{trend} {_sparkline(overview.reward_curve)}"
    )
    if by_env := describe_rewards(None, overview.rewards):
        yield Text(f"rewards   {printable(by_env)}")
    rows = overview.evaluations
    if rows:
        shown = ";  ".join(printable(evaluation_summary(row)) for row in rows)
        yield Text(f"held out  {shown}", style="bold")
    if lost := describe_lost_generation(overview.lost_generation):
        yield Text(f"lost      {lost}")
    if not overview.ended:
        found = overview.bottleneck
        named = f"{found.service} {printable(found.reason)}" if found else "none: nothing is under way"
        yield Text(f"bottleneck  {named}", style="bold")
    for line in notice_lines(overview.notices, time.time_ns()):
        yield Text(f"notice: {printable(line)}", style="yellow")
    for warning in overview.warnings:
        yield Text(f"warning: {printable(warning)}", style="yellow")


def _columns(overview: RunState) -> list[TableColumn]:
    rows = overview.stages
    slowest = overview.bottleneck.service if overview.bottleneck else None

    def figures(name: str, cell: Callable[[StageRow], str], least: int = 0, most: int = FULL_DETAIL) -> TableColumn:
        return TableColumn(name, [Text(cell(row)) for row in rows], right=True, least=least, most=most)

    return [
        TableColumn("", [Text(">" if row.service == slowest else " ") for row in rows]),
        TableColumn("stage", [Text(printable(row.service)) for row in rows]),
        TableColumn("state", [Text(row.state, style=_STYLES.get(row.state, "")) for row in rows]),
        figures("load", lambda row: "-" if row.load is None else f"{100 * row.load:.0f} %"),
        figures("lag", lambda row: _count(row.lag)),
        figures("trend", lambda row: _trend(row.lag_per_s), least=2),
        figures("held", lambda row: _count(row.in_flight), least=1),
        figures("unacked", lambda row: _count(row.unacked), least=2),
        figures("in/s", lambda row: _number(row.in_per_s), least=1),
        figures("out/s", lambda row: _number(row.out_per_s)),
        figures("wait p50/p95/p99", lambda row: _times(row.wait), least=FULL_DETAIL),
        figures("process p50/p95/p99", lambda row: _times(row.process), least=FULL_DETAIL),
        figures("wait p99", lambda row: human_seconds(row.wait.p99) or "-", most=FULL_DETAIL - 1),
        figures("process p99", lambda row: human_seconds(row.process.p99) or "-", most=FULL_DETAIL - 1),
        figures("again", lambda row: _count(row.redelivered), least=1),
        figures("dead", lambda row: _count(row.dead), least=1),
        figures("n", lambda row: str(row.instances), least=2),
    ]


def _footer(overview: RunState) -> Iterator[Text]:
    if overview.ended:
        return
    for row in overview.stages:
        if row.notes and row.state in {"waiting", "stale"}:  # what holds back a lease is a consequence, not a cause
            yield Text(f"{row.service}: {printable(row.notes[0])}", style="dim")
    if overview.slow:
        yield Text("slowest rollouts of the last steps (lachesis trace ID shows where the time went)")
    for rollout in overview.slow:
        yield Text(f"  {rollout.group}  {human_seconds(rollout.seconds)}  {rollout.url or ''}")


def _legend(overview: RunState, shown: Collection[str]) -> Text:
    """Say what the columns that are shown mean."""
    if overview.ended:
        times = f"times and rates: of its last steps, {overview.window_s:.3g} s; `lachesis up` would go on with it"
        return Text(times, style="dim")
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in _COLUMN_TEXTS.items() if name in shown)
    return Text(f"groups of rollouts, over the last {overview.window_s:g} s. {meanings}. {_STATES}", style="dim")


def _times(times: Quantiles) -> str:
    return "/".join(human_seconds(value) or "-" for value in (times.p50, times.p95, times.p99))


def _trend(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:+.1f}/s" if abs(per_s) >= _TREND else "="


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return human_number(value) or "-"


def _sparkline(values: list[float], width: int = 24) -> str:
    values = values[-width:]
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((value - low) * scale)] for value in values)
