"""Runs the run's own nats-server: starts it again when it ends, and stops it after all else."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from lachesis.pipeline.bus.disk_room import StoreFinding
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.bus.store_reservation import store_budget
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.outages import EXHAUSTED
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.run.connect import NATS_FOLDER
from lachesis.services.supervisor.store_place import watch_place
from lachesis.services.supervisor.store_watch import watch_store

__all__ = ["RunServer"]

log = logging.getLogger("lachesis")

_RETRY_S = 1.0


class RunServer:
    """`pid` is None while there is none, as where the run is on a server that runs elsewhere.

    `unless_stopped` starts it unless the run is requested to stop before; `changed` is called when `pid` has changed.
    """

    def __init__(
        self,
        config: RunConfig,
        unless_stopped: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        report_disk: Callable[[StoreFinding], None],
        changed: Callable[[], None],
    ) -> None:
        self.pid: int | None = None
        self._config = config
        self._unless_stopped = unless_stopped
        self._report_disk = report_disk
        self._changed = changed

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the embedded server, if the run has no other, for as long as the context is open.

        There is none if the run is requested to stop before the server has started.
        """
        if self._config.nats is not None:
            async with background() as tasks:
                tasks.start_soon(watch_place, self._config, None)
                yield
            return
        settings = self._config.server
        if settings.max_file_bytes is None:
            room = self._config.streams.total_bytes() * 5 // 4
            settings = msgspec.structs.replace(settings, max_file_bytes=room)
        server = EmbeddedServer(self._config.path / NATS_FOLDER, settings)
        try:
            await self._unless_stopped(server.start)
            if server.running_pid is None:
                yield
                return
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep_running, server)
                watched = server, store_budget(server.store, self._config.streams), self._report_disk
                tasks.start_soon(watch_store, *watched)
                tasks.start_soon(watch_place, self._config, server)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await server.stop()

    async def _keep_running(self, server: EmbeddedServer) -> None:
        while True:
            self.pid = server.pid
            self._changed()
            code = await server.wait()
            log.warning("nats-server ended with code %s; starting it again on the same port and store", code)
            while True:
                try:
                    await server.start_again()
                    break
                except OSError as error:
                    if error.errno not in EXHAUSTED:
                        raise
                    log.warning("nats-server cannot be started, and is tried again: %s", error.strerror)
                await anyio.sleep(_RETRY_S)
