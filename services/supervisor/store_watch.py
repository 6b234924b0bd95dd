"""Watches the disk under the run's server; warns before it is full, restarts a server that failed.

A restart loses nothing: publishers repeat what was not acknowledged, and clients come back by themselves. It is done
only once there is room again, and more and more rarely where the writes keep failing.
"""

import logging
import time
from collections.abc import Callable

import anyio
import anyio.to_thread

from lachesis.pipeline.bus.disk_room import RESTART_BYTES, StoreFinding, StoreLogReader, assess, stored_bytes
from lachesis.pipeline.bus.embedded import EmbeddedServer
from lachesis.pipeline.common.disk import disk_room
from lachesis.pipeline.common.ticks import sleep_until_tick

__all__ = ["watch_store"]

log = logging.getLogger("lachesis")

_PERIOD_S = 0.5
_MEASURE_S = 10.0
"""Between two measurements of what the store holds, which look at each of its files."""
_MIN_PAUSE_S = 2.0
_MAX_PAUSE_S = 300.0
"""Between two restarts, which become rarer while they do not help."""
_STEADY_S = 600.0
"""A server that took messages for so long has been helped."""


async def watch_store(server: EmbeddedServer, budget_bytes: int, report: Callable[[StoreFinding], None]) -> None:
    """Report how the disk of `server` stands, again and again, and restart it when only that helps.

    Runs until cancelled. `budget_bytes`: what its streams may hold together.
    """
    watch = _DiskWatch(server, budget_bytes, report)
    while True:
        await watch.check_disk()
        await sleep_until_tick(_PERIOD_S)


class _DiskWatch:
    def __init__(self, server: EmbeddedServer, budget_bytes: int, report: Callable[[StoreFinding], None]) -> None:
        self._server = server
        self._budget = budget_bytes
        self._life = server.life
        self._log = StoreLogReader(server.log_path)
        self._report = report
        self._stored, self._measured_s = 0, -_MEASURE_S
        self._pause_s, self._restarted_s = _MIN_PAUSE_S, float("-inf")

    async def check_disk(self) -> None:
        now_s = time.monotonic()
        if self._server.life != self._life:  # it was started, and its log with it
            self._life, self._log = self._server.life, StoreLogReader(self._server.log_path)
        if now_s - self._measured_s >= _MEASURE_S:
            self._stored = await anyio.to_thread.run_sync(stored_bytes, self._server.store)
            self._measured_s = now_s
        self._log.read_on()
        room = await anyio.to_thread.run_sync(disk_room, self._server.store)
        self._report(assess(self._server.store, room, self._stored, self._budget, self._log.failed))
        if self._log.failed and (room.free_bytes >= RESTART_BYTES or not room.total_bytes):
            await self._restart(now_s)

    async def _restart(self, now_s: float) -> None:
        since_s = now_s - self._restarted_s
        if since_s < self._pause_s:
            return
        self._pause_s = _MIN_PAUSE_S if since_s > _STEADY_S else min(2 * self._pause_s, _MAX_PAUSE_S)
        self._restarted_s = now_s
        log.warning("restarting nats-server, without which %s would take no message again: nothing is lost by it",
                    ", ".join(sorted(self._log.failed)))  # fmt: skip
        await self._server.end()  # `RunServer` starts it again
        while self._server.life == self._life:  # noqa: ASYNC110 - it is being started
            await anyio.sleep(0.05)
