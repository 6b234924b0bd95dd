"""Watches a run over the bus, and measures its processes, for a `RunObservation`.

Reads heartbeats, the headers of rollouts, events and the ledger. Nothing is written and no consumer is made. A watch
ends with the supervisor's life that it belongs to; the next one goes on where it stopped.
"""

from contextlib import aclosing

import anyio
import anyio.abc
import psutil

from lachesis.pipeline.access import OBSERVER
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import StartupError
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.schemas import subjects
from lachesis.services.demo.observed import RunObservation
from lachesis.services.run.connect import connect_run

__all__ = ["measure_processes", "watch_run"]

_RETRY_S = 0.25
_MEASURE_S = 1.0


async def watch_run(config: RunConfig, observed: RunObservation) -> None:
    """Follow the run until cancelled, waiting for its server to come up. Raises `AccessError`."""
    run, revision = config.run, config.revision
    sources = [
        (subjects.ROLLOUTS, [subjects.rollout(run)]),
        (subjects.EVENTS, [subjects.event(kind, run, revision) for kind in ("eval", "reward", "dead")]),
        (subjects.LEDGER, [subjects.ledger(run, config.training.name)]),
    ]
    async with await _connect(config) as bus, anyio.create_task_group() as tasks:
        await tasks.start(_follow_heartbeats, bus, run, observed)
        for stream, filters in sources:  # they exist: services send heartbeats after the streams are made
            tasks.start_soon(_follow, bus, stream, filters, observed)


async def _connect(config: RunConfig) -> NatsBus:
    while True:
        try:
            return await connect_run(config, f"{config.run}.demo", OBSERVER)
        except StartupError:  # the supervisor is about to start the server, or to say why it cannot
            await anyio.sleep(_RETRY_S)


async def _follow_heartbeats(
    bus: Bus, run: str, observed: RunObservation, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    started = False
    async with aclosing(listen_to_heartbeats(bus, run)) as beats:
        async for beat in beats:
            observed.heartbeat(beat)
            if not started:
                started = True
                task_status.started()


async def _follow(bus: Bus, stream: str, filters: list[str], observed: RunObservation) -> None:
    headers_only = stream == subjects.ROLLOUTS
    start = observed.next_seq.get(stream, 1)
    async with bus.read(stream, filters, start=start, headers_only=headers_only) as messages:
        async for message in messages:
            observed.stored(message)


async def measure_processes(supervisor_pid: int, observed: RunObservation) -> None:
    """Measure peak memory of all processes of the run, and the CPU time of each."""
    while True:
        total = psutil.Process().memory_info().rss
        try:
            supervisor = psutil.Process(supervisor_pid)
            processes = [supervisor, *supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                total += process.memory_info().rss
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            observed.cpu_s[process.pid] = times.user + times.system
        observed.peak_rss_bytes = max(observed.peak_rss_bytes, total)
        await anyio.sleep(_MEASURE_S)
