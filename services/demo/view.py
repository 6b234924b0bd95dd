"""Live progress: a table that redraws itself on a terminal, a line every few seconds without one.

Services that wait follow it, each with what it tries again, since when and why.
"""

import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lachesis.services.demo.observed import RunObservation
from lachesis.services.observe.run_state import RunState
from lachesis.services.observe.services import ServiceStatus
from lachesis.services.output import SafeConsole, human_seconds, printable

__all__ = ["fitting", "progress_line", "showing", "stage_table"]

_LIVE_S = 0.5
_LINE_S = 5.0
_PLAIN_WIDTH = 120
"""Characters of a line where no terminal limits it."""
_POINTS = 3
"""Evaluations in a line: the first and the newest."""


@asynccontextmanager
async def showing(observed: RunObservation, started: float) -> AsyncIterator[None]:
    """Show progress until the context ends. `started`: monotonic seconds."""
    terminal = sys.stdout.isatty()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(
            _live if terminal else _lines,
            lambda state, width: progress_line(observed, state, time.monotonic() - started, width),
            observed,
        )
        yield
        tasks.cancel_scope.cancel()


async def _live(line: Callable[[RunState, int], str], observed: RunObservation) -> None:
    with Live(auto_refresh=False, transient=True, console=SafeConsole()) as live:
        while True:
            state = observed.state(time.time_ns())
            text = Text(line(state, live.console.width), style="bold", no_wrap=True)
            waits = [Text(printable(wait), style="yellow") for wait in observed.waits()]
            live.update(Group(text, stage_table(state), *waits), refresh=True)
            await anyio.sleep(_LIVE_S)


async def _lines(line: Callable[[RunState, int], str], observed: RunObservation) -> None:
    width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns
    said: list[str] = []
    try:
        while True:
            await anyio.sleep(_LINE_S)
            state = observed.state(time.time_ns())
            shown = line(state, width)
            slowest = f" | {_slowest(state)}"
            print(shown + slowest if len(shown + slowest) <= width else shown, flush=True)
            waits = observed.waits()
            for wait in waits:
                if wait not in said:  # once, until it waits for something else
                    print(f"       {printable(wait)}", flush=True)
            said = waits
    finally:
        print(line(observed.state(time.time_ns()), width), flush=True)  # how far it came


def _shortened(points: list[str]) -> list[str]:
    return points if len(points) <= _POINTS else [points[0], "...", *points[1 - _POINTS :]]


def progress_line(observed: RunObservation, state: RunState, elapsed_s: float, width: int = _PLAIN_WIDTH) -> str:
    """Return the state of the run in one line of at most `width` characters.

    The last figures are left out first. `state`: that of `observed` now.
    """
    curve = " ".join(_shortened([f"{100 * event.avg:.0f}%@{step}" for step, event in sorted(observed.evals.items())]))
    restarts = state.restarts.get("supervisor", 0)
    stopped = ", ".join(observed.stopped())
    return fitting(
        [
            f"{elapsed_s:4.0f} s",
            f"step {state.step or 0}/{state.steps}",
            *([f"supervisor restarted {restarts}x"] if restarts > 0 else []),
            *([f"{stopped} by a health check: lachesis health --run {state.run}"] if stopped else []),
            _maybe("reward", state.reward, ".3f"),
            f"held out {curve or '-'}",
            f"{state.groups_per_s:.1f} groups/s",
            f"{state.tokens_per_s:.0f} tokens/s",
            _maybe("staleness", state.staleness, ".1f"),
            _maybe("e2e p99", state.e2e_p99_s, ".1f") + " s",
        ],
        width,
    )


def fitting(parts: Sequence[str], width: int) -> str:
    """Return as many of the parts as fit into `width` characters.

    None is cut, unless the first alone is too long.
    """
    line = parts[0]
    for part in parts[1:]:
        if len(f"{line} | {part}") > width:
            break
        line = f"{line} | {part}"
    return line[:width]


def stage_table(state: RunState) -> Table:
    """Return the figures of every stage."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("stage", "state", "lag", "handled", "dead", "wait p99", "process p99"):
        table.add_column(name, justify="left" if name in {"stage", "state"} else "right", no_wrap=True)
    for row in state.services:
        table.add_row(row.service, *_cells(row))
    return table


def _cells(row: ServiceStatus) -> list[str]:
    counts = ["-" if value is None else str(value) for value in (row.lag, row.handled, row.dead)]
    return [row.state, *counts, *(human_seconds(value) or "-" for value in (row.wait.p99, row.process.p99))]


def _slowest(state: RunState) -> str:
    """Name lag and p99 of the stages that wait or work, briefly."""
    shown = [
        f"{row.service} {'' if row.lag is None else f'lag {row.lag} '}p99 {human_seconds(row.process.p99)}"
        for row in state.services
        if row.process.p99
    ]
    started = ", ".join(row.service for row in state.services)
    return ", ".join(shown) or "starting: " + (started or "waiting for the first service")


def _maybe(name: str, value: float | None, form: str) -> str:
    return f"{name} {'-' if value is None else format(value, form)}"
