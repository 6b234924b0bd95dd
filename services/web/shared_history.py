"""One connection to a run's history for all requests: opened when it is needed, closed when it is not.

Guarantees that the history is open while a request uses it, that a run which ends is read from its folder from then
on, and that its store is free for others some seconds after the last request: `lachesis up` may resume the run.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import LachesisError
from lachesis.services.run.connect import CONNECT_S, RunHistory, open_run, until_ended

__all__ = ["SharedHistory"]

log = logging.getLogger("lachesis")

_IDLE_S = 10.0
"""Seconds without a request after which the history is closed."""


class _Opening:
    """One life of the connection; `done` is set once it is open or has failed."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.history: RunHistory | None = None
        self.error: LachesisError | None = None


class SharedHistory:
    """`serve` runs beside the requests, and each of them uses `borrow`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._users = 0
        self._used = anyio.Event()
        self._current: _Opening | None = None
        self._wanted = anyio.Event()

    @property
    def reads_store(self) -> bool:
        """Whether the server that is open is one of our own, on the store of a run that has ended."""
        history = self._current.history if self._current is not None else None
        return history is not None and history.ended

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[RunHistory]:
        """Yield the open history. Raises as `open_run`."""
        if self._current is None:
            self._current = _Opening()
            self._wanted.set()
        opening = self._current
        self._users += 1
        self._used.set()
        try:
            await opening.done.wait()
            if opening.history is None:
                raise opening.error or StartupError(f"the history of run {self._config.run} could not be opened")
            yield opening.history
        finally:
            self._users -= 1
            self._used.set()

    async def serve(self) -> None:
        """Open and close the history as requests need it, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            opening = self._current
            if opening is None:
                continue
            try:
                async with open_run(self._config, f"{self._config.run}.web", patience_s=CONNECT_S) as history:
                    opening.history = history
                    opening.done.set()
                    await self._until_needless(history)
                    self._current = None  # before it closes, which takes a while
            except LachesisError as error:
                opening.error = error
                log.info("the history of run %s was closed: %s", self._config.run, error)
            finally:
                if self._current is opening:
                    self._current = None
                opening.done.set()

    async def _until_needless(self, history: RunHistory) -> None:
        """Return once the history was unused for a while, or the run whose server it is has ended."""
        async with background() as tasks:
            if not history.ended:
                tasks.start_soon(history.bus.keep_served)
                tasks.start_soon(self._until_ended, history, tasks.cancel_scope)
            while True:
                self._used = anyio.Event()
                with anyio.move_on_after(_IDLE_S) as idle:
                    await self._used.wait()
                if idle.cancelled_caught and not self._users:
                    return

    async def _until_ended(self, history: RunHistory, scope: anyio.CancelScope) -> None:
        await until_ended(history.bus, self._config)
        scope.cancel()
