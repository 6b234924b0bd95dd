"""A progress bar and a clean stop, for commands that run long."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.services.output import SafeConsole

__all__ = ["PAUSED", "bar", "drain_on_signal"]

PAUSED = 130
"""Exit code of a command that was interrupted: as a shell gives it, and another than that of a failure."""


@contextmanager
def bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that takes how much is done, of how much. By default both are groups."""
    shown = columns or (MofNCompleteColumn(), TextColumn("groups"))
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), *shown, TimeElapsedColumn(), TimeRemainingColumn(),
        console=SafeConsole(stderr=True), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with progress:
        task = progress.add_task(what, total=None)

        def advance(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield advance


async def drain_on_signal(draining: anyio.Event, drain: Callable[[], None]) -> None:
    """Call `drain`, which sets `draining`, on SIGINT or SIGTERM.

    On a second signal, end at once: nothing but time is lost.
    """
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        async for number in signals:
            if draining.is_set():
                if number == signal.SIGHUP:
                    continue
                raise KeyboardInterrupt
            drain()
