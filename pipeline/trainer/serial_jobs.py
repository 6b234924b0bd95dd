"""Runs jobs in the background of a task group, one after the other. No torch.

Guarantees that a job begins once the one before it has ended, so the next job never overtakes what a job publishes. A
job that fails ends the group, and with it every task that waits here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup

__all__ = ["SerialJobs"]


class SerialJobs:
    """The jobs of `tasks`. To be used by one task."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._done = anyio.Event()
        self._done.set()

    async def finish(self) -> None:
        """Wait until nothing is under way."""
        await self._done.wait()

    async def start(self, job: Callable[[], Awaitable[None]]) -> None:
        """Begin `job` once nothing is under way, and go on meanwhile."""
        await self.finish()
        self._done = anyio.Event()
        self._tasks.start_soon(self._run, job, self._done)

    async def _run(self, job: Callable[[], Awaitable[None]], done: anyio.Event) -> None:
        await job()
        done.set()
