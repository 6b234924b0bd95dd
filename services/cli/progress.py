"""A bar on the terminal for work of known length; nothing where there is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["bar"]


@contextmanager
def bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int | None], None]]:
    """Yield what is told how much is done, of how much. By default both are groups."""
    shown = columns or (MofNCompleteColumn(), TextColumn("groups"))
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), *shown, TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with progress:
        task = progress.add_task(what, total=None)

        def tell(done: int, total: int | None) -> None:
            progress.update(task, completed=done, total=total)

        yield tell
