"""The supervisor (`lachesis up`): starts the server and every service in order; keeps them running.

Guarantees: a service starts once the heartbeats of those of lower phases say that they are ready, and stops before them
(if they have just run, under a supervisor that was killed, all start at once). A process that dies or hangs is started
again after a pause. A process that cannot run (`restarts`) ends the run with the end of its log. Processes that a
service started end with it (`process/reaper`). When the supervisor dies, however it dies, its processes notice and
drain, so nothing is left behind. Starting it again continues the run. One supervisor runs a run: it holds the lock of
the run's folder and a lease on the server (`run/supervisor_lease.py`).
"""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from lachesis.pipeline.access import OPERATOR
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.embedded import SERVER_LOG
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import DeferredFile, retry_until_room, write_when_room
from lachesis.pipeline.common.late_output import flush_output
from lachesis.pipeline.common.machine_memory import MemoryKills
from lachesis.pipeline.common.outages import EXHAUSTED
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.common.ticks import sleep_until_tick
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import InfrastructureError, NotFoundError, StartupError
from lachesis.pipeline.extension import HeldSocket, load_place
from lachesis.pipeline.ledger.rollbacks import refuse_rolled_back
from lachesis.pipeline.notices.changes import PastNotice
from lachesis.pipeline.notices.facts import ProcessFact
from lachesis.pipeline.promotion.record import read_promotions
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.runtime.retention_record import RETENTION_FILE, follow_record
from lachesis.pipeline.runtime.retries import WaitLog, retry_outages
from lachesis.pipeline.runtime.store_marks import MARKS_FILE, MarkWriter, follow_marks
from lachesis.schemas.errors import ConfigError, SchemaError
from lachesis.schemas.values import from_json
from lachesis.services.observe.run_watcher import RunWatcher
from lachesis.services.planned_processes import PlannedProcess, planned_processes
from lachesis.services.preflight.budget_check import check_budgets
from lachesis.services.process.service_process import (
    EXIT_DRAIN_TIMEOUT,
    EXIT_DRAINED,
    STACKS_SIGNAL,
)
from lachesis.services.process.single_writer import WriterPlace, refuse_writers_beside
from lachesis.services.registry import find
from lachesis.services.run.connect import NATS_FOLDER, connect_run
from lachesis.services.run.known_runs import register_run
from lachesis.services.run.process_identity import started_ticks
from lachesis.services.run.run_file import run_file_of, write_run_file
from lachesis.services.run.store import (
    keep_record,
    make_streams,
    refuse_foreign_folder,
    refuse_lost_folder,
    refuse_unknown_history,
)
from lachesis.services.run.supervisor_lease import RunLease, lock_folder, refuse_deleting
from lachesis.services.run.supervisor_state import SUPERVISOR_LOG, Phase, SupervisorStateWriter
from lachesis.services.stage_settings import ledger_settings
from lachesis.services.supervisor.blocked_processes import BlockedProcesses
from lachesis.services.supervisor.child import ServiceProcess
from lachesis.services.supervisor.forking import ForkServers, SpawnedProcess, start_service
from lachesis.services.supervisor.forkserver import ForkRequest
from lachesis.services.supervisor.hung import SilentProcess, why_hung
from lachesis.services.supervisor.last_words import LOOKED_AT_LINES, last_words
from lachesis.services.supervisor.ledger_check import verify_ledger
from lachesis.services.supervisor.log_limit import LogLimit, read_tail
from lachesis.services.supervisor.notices import RunNotices
from lachesis.services.supervisor.readiness import LateProcess, describe_late, ready_within_s
from lachesis.services.supervisor.restarts import ProcessLife, Restarts
from lachesis.services.supervisor.run_server import RunServer
from lachesis.services.supervisor.running_process import RunningProcess, send, state_of
from lachesis.services.supervisor.unfinished import trace_unfinished

__all__ = ["Supervisor", "has_survivors"]

log = logging.getLogger("lachesis")

_PIDS_FILE = "pids.json"
_TAIL_LINES = 15
_MARK_S = 5.0
"""Seconds that the end of a run waits for the server to take the marks of its streams."""
_LOOK_S = 1.0
_STACKS_S = 0.5
"""Seconds that a process that hangs has to write where it does."""
_MARGIN_S = 4.0
"""Seconds beyond its drain after which a process is killed."""


def has_survivors(folder: Path) -> bool:
    """Whether processes of a supervisor that was killed still run in a run's folder.

    The next one goes on with them.
    """
    try:
        pids = from_json(_PIDS_FILE, dict[str, int | None], read_small_file(folder / _PIDS_FILE))
    except (OSError, SchemaError):
        return False
    return any(pid is not None and started_ticks(pid) is not None for pid in pids.values())


class Supervisor:
    """Runs one run. Every process uses the file in its folder (`run_file`), written first: editing a file meanwhile
    changes nothing until the next start. `file`: what the run was started with; `watches` look on while it runs."""

    def __init__(self, config: RunConfig, watches: Sequence[RunWatcher] = (), *, file: Path | None = None) -> None:
        if not config.environments:
            raise ConfigError(
                "environments: empty, so nothing would be generated; add [environments.NAME] with its kind"
            )
        check_budgets(config)
        self.config = config
        self.file = file
        self.arguments = ["--config", str(run_file_of(config))]
        self.watches = watches
        self.logs = config.path / "logs"
        self.running = [RunningProcess(planned) for planned in planned_processes(config)]
        # what trains elsewhere needs no torch, which a fork server of its kind would import
        planned = [row.planned for row in self.running]
        elsewhere = {row.service for row in planned if config.trains_elsewhere(row.service, row.part)}
        forked = {service for row in planned for service in row.services} - elsewhere
        self._forks = ForkServers(self.arguments, forked if config.services.forkserver else (), config.path)
        self._goes_on = False
        """Whether the services have just run, under a supervisor that was killed: its fork servers were taken over."""
        self._stop = anyio.Event()
        self._pids = DeferredFile(config.path / _PIDS_FILE)
        self._state = SupervisorStateWriter(config.path)
        self._marks = DeferredFile(config.path / MARKS_FILE)
        self._retention = DeferredFile(config.path / RETENTION_FILE)
        self._phase: Phase = "starting"
        self._memory_kills = MemoryKills()
        self._verifying = anyio.CancelScope()
        self._notices = RunNotices(config, self._process_facts, lambda: self._server.pid)
        self._server = RunServer(config, self._unless_stopped, self._notices.report_disk, self._write_pids)
        self._held = ExitStack()
        self._listeners: dict[str, socket.socket] = {}
        self.has_begun = False
        """Whether the run's folder is this supervisor's."""
        self.has_served = False
        """Whether it came to start services; it does not if it is requested to stop before."""

    @property
    def notices(self) -> list[PastNotice]:
        """All that stood in the way of the run since this supervisor began, or still does."""
        return self._notices.history

    def stop(self) -> None:
        """Ask for an ordered stop."""
        self._stop.set()

    def restarts(self) -> dict[str, int]:
        """Return how often each process was started again."""
        return {row.planned.name: max(0, row.restarts) for row in self.running}

    def kill(self) -> None:
        """Stop without waiting for anything to drain; what was held is handled again by the next run."""
        self._verifying.cancel()
        self._stop.set()
        for row in self.running:
            row.stop(signal.SIGKILL)

    async def run(self) -> None:
        """Run until requested to stop or until every finite service has finished.

        Raises `StartupError`, and `LedgerError` where the ledger is found to be broken in the end.
        """
        refuse_foreign_folder(self.config)
        refuse_lost_folder(self.config)
        try:
            mkdir = partial(self.logs.mkdir, parents=True, exist_ok=True)
            await self._unless_stopped(write_when_room, self.logs, mkdir)
        except OSError as error:
            raise StartupError(
                f"the run's folder {self.config.path} cannot be written ({error}): choose another --set folder=DIR"
            ) from error
        if self._stop.is_set():
            return
        with lock_folder(self.config.path, self.config.run):
            self.has_begun = True
            self._report_state()
            try:
                await self._unless_stopped(write_run_file, self.config)
                if not self._stop.is_set():
                    register_run(self.config, self.file)
                    async with background() as beside:
                        beside.start_soon(self._notices.watch_run)
                        self._goes_on = await beside.start(self._forks.keep_running)  # they import meanwhile
                        await self._run_with_server()
            finally:
                self._enter("ended")

    async def _run_with_server(self) -> None:
        async with self._server.running():
            if self._stop.is_set():
                return
            async with await connect_run(self.config, f"{self.config.run}.supervisor", OPERATOR) as bus:
                bus.outlast_refusals()
                await self._unless_stopped(refuse_deleting, bus, self.config.run)
                await self._unless_stopped(make_streams, bus, self.config)
                register_run(self.config, self.file, stored=self.config.nats is None)
                lease = RunLease(bus, self.config.run, self.config.path, self.stop)
                await self._unless_stopped(lease.acquire)
                if not lease.is_held:
                    return
                async with lease.held():
                    await self._unless_stopped(self._refuse_other_writers, bus)
                    await self._unless_stopped(refuse_unknown_history, bus, self.config)
                    await self._unless_stopped(refuse_rolled_back, bus, ledger_settings(self.config))
                    await self._run_services(bus)

    async def _run_services(self, bus: NatsBus) -> None:
        if self._stop.is_set():
            return
        self.has_served = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flush_output)
            copies = self._marks, self._retention
            tasks.start_soon(retry_until_room, self._pids, self._state.file, *copies, self._notices.file)
            tasks.start_soon(follow_marks, bus, self._marks)
            tasks.start_soon(follow_record, bus, self.config.run, self.config.path, self._retention)
            tasks.start_soon(self._notices.watch_server, bus)
            tasks.start_soon(self._tell_promoted, bus)
            tasks.start_soon(keep_record, bus, self.config)
            tasks.start_soon(self._watch_heartbeats, bus)
            tasks.start_soon(self._end_hung)
            tasks.start_soon(self._watch_held, BlockedProcesses(bus, self.config.run))
            tasks.start_soon(LogLimit(self.config.services.log_bytes, self._log_files).watch, self._notices.report_logs)
            for watch in self.watches:
                tasks.start_soon(watch.follow, bus)
            try:
                await self._up_and_down(tasks)
            finally:
                with anyio.CancelScope(shield=True):
                    if not self._verifying.cancel_called:
                        await trace_unfinished(bus, self.config)
                        await self._mark_ends(bus)
            tasks.cancel_scope.cancel()
        for watch in self.watches:
            await watch.finish(bus)
        with self._verifying:
            await verify_ledger(bus, self.config, self._notices.ledger_broken)

    async def _mark_ends(self, bus: NatsBus) -> None:
        """Write how far the streams go now that no process writes any more, so that any later loss is noticed."""
        try:
            with anyio.fail_after(_MARK_S):
                writer = await MarkWriter.open(bus, self.config.run, self.config.path)
                await writer.write(None, now=True)
                if writer.newest is not None:
                    self._marks.write(msgspec.json.encode(writer.newest))
        except (TimeoutError, InfrastructureError, NotFoundError, SchemaError) as error:
            log.warning("how far the streams go was not written down: %s", str(error) or "no answer in time")

    async def _unless_stopped(self, call: Callable[..., Awaitable[object]], *arguments: Any) -> None:
        """Await a call that may wait for long, until requested to stop."""
        async with background() as tasks:
            tasks.start_soon(self._cancel_on_stop, tasks.cancel_scope)
            await call(*arguments)

    async def _refuse_other_writers(self, bus: Bus) -> None:
        ours = WriterPlace.current(self.config.path, supervised=True)
        services = [service for row in self.running for service in row.planned.services]
        await refuse_writers_beside(bus, self.config, services, replaces=ours)

    async def _tell_promoted(self, bus: Bus) -> None:
        """Say that another revision than this configuration's scores rollouts, where the run was switched."""
        async for attempt in retry_outages("read the promotions", WaitLog()):
            with attempt:
                promotions, _ = await read_promotions(bus, self.config.run, self.config.revision)
        for one in promotions[-1:]:
            since = "as soon as it is decided" if one.first is None else f"from sequence {one.first} on"
            log.warning("revision %s judges rollouts %s, whatever the configuration says of raters, normalization and "
                        "advantages: %s promoted it", one.revision, since, one.by)  # fmt: skip

    async def _up_and_down(self, tasks: anyio.abc.TaskGroup) -> None:
        try:
            with anyio.CancelScope() as starting:
                tasks.start_soon(self._cancel_on_stop, starting)
                for phase in sorted({row.planned.phase for row in self.running}):
                    rows = [row for row in self.running if row.planned.phase == phase]
                    for row in rows:
                        tasks.start_soon(self._keep_running, row)
                    if not self._goes_on:
                        await self._ready(rows)
                await self._ready(self.running)
                log.info("all %d processes are ready", len(self.running))
                self._enter("running")
                await self._until_finished()
        finally:
            self._enter("stopping")
            self._notices.conclude()
            with anyio.CancelScope(shield=True), self._held:
                await self._stop_all()

    async def _cancel_on_stop(self, scope: anyio.CancelScope) -> None:
        await self._stop.wait()
        scope.cancel()

    async def _ready(self, rows: list[RunningProcess]) -> None:
        services = [row.planned.service for row in rows]
        with anyio.move_on_after(ready_within_s(self.config, services)):
            for row in rows:
                await row.ready.wait()
            return
        late = [
            LateProcess(row.planned.name, row.process is not None, row.starts_with, self._last_lines(row, 1))
            for row in rows
            if not row.ready.is_set()
        ]
        raise StartupError(describe_late(self.config, services, late))

    async def _until_finished(self) -> None:
        finite = [row for row in self.running if row.planned.finite]
        if not finite:
            await anyio.sleep_forever()
        for row in finite:
            await row.ended.wait()
        log.info("the run has finished its %s steps", self.config.training.steps)

    async def _keep_running(self, row: RunningProcess) -> None:
        """Start the process whenever it is not running, until it finishes or is to stop."""
        try:
            with row.lives:
                await self._start_again_and_again(row)
        finally:
            row.ended.set()

    async def _start_again_and_again(self, row: RunningProcess) -> None:
        history, anew = Restarts(), False
        while not row.stopping:
            row.restarts += 1
            row.up, row.hung = False, ""
            row.stages.clear()
            row.started_s = time.monotonic()
            code, noted = await self._run_once(row, anew=anew)
            if row.stopping or (row.planned.finite and code == 0 and noted):
                break
            starved = self._memory_kills.were_just_now(time.monotonic())
            seconds = time.monotonic() - row.started_s
            life = ProcessLife(code, seconds, row.up, starved, row.worked, noted, row.hung)
            if (lasting := history.why_last(life)) is not None:
                raise StartupError(f"{row.planned.name} {lasting}:\n{self._last_lines(row)}")
            anew = noted and code in {
                EXIT_DRAINED,
                EXIT_DRAIN_TIMEOUT,
            }  # by somebody, perhaps for it to take up another build
            pause = history.ended(life)
            row.ends_s.append(time.monotonic())
            if pause is None:
                raise StartupError(
                    f"{row.planned.name} failed {history.failures} times in a row, and last {life}:\n"
                    f"{self._last_lines(row)}"
                )
            lines = self._last_lines(row, LOOKED_AT_LINES).splitlines()
            said = "" if life.killed else last_words(lines, drained=anew, noted=noted)
            why = f": {said}" if said else ""
            log.warning("%s %s%s; starting it again in %.1f s", row.planned.name, life, why, pause)
            row.failing = row.last_end = f"{life}{why}"
            with anyio.move_on_after(pause):
                await self._stop.wait()

    def _last_lines(self, row: RunningProcess, count: int = _TAIL_LINES) -> str:
        try:
            return read_tail(self.logs / f"{row.planned.name}.log", row.log_start, count)
        except OSError:  # it has written none, or no file descriptor is left
            return ""

    async def _run_once(self, row: RunningProcess, *, anew: bool) -> tuple[int, bool]:
        """Return the exit code of one life, and whether the process has noted that it ends with it."""
        file = self.logs / f"{row.planned.name}.log"
        row.log_start = file.stat().st_size if file.exists() else 0
        process = await self._start_once_possible(row, file, anew=anew)
        row.process = process
        self._write_pids()
        if row.stopping:
            send(process, signal.SIGTERM)
        with anyio.CancelScope(shield=True):  # its end is awaited whatever happens: `_stop_all` brings it about
            code = await process.wait()
        row.process = None
        return code, process.noted == code

    async def _start_once_possible(
        self, row: RunningProcess, file: Path, *, anew: bool
    ) -> SpawnedProcess | ServiceProcess:
        """Start a process as soon as the machine gives what that takes: file descriptors, memory, a process."""
        while True:
            try:
                return await self._start(row.planned, file, anew=anew)
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                said = f"cannot be started, and is tried again: {error.strerror}"
                if row.failing != said:
                    log.warning("%s %s", row.planned.name, said)
                row.failing = row.last_end = said
            await anyio.sleep(_LOOK_S)
            row.started_s = time.monotonic()

    async def _start(self, planned: PlannedProcess, file: Path, *, anew: bool) -> SpawnedProcess | ServiceProcess:
        """Start a process that logs to `file`: by a fork, unless no fork server can, or `anew` forbids it."""
        limit_s = self.config.drain_s(planned.service) + _MARGIN_S
        reported = ForkRequest(
            service=planned.service, part=planned.part, replica=planned.replica, log=str(file), limit_s=limit_s
        )
        if not anew and (forked := await self._forks.fork(reported)) is not None:
            return forked
        command = [sys.executable, "-P", "-m", "lachesis", "run", planned.service, *filter(None, [planned.part])]
        command += [*self.arguments, "--replica", str(planned.replica), "--supervised"]
        held = find(planned.services[0]).socket  # a service that has one shares no process
        if held is None or (listener := self._hold_listener(planned.service, held)) is None:
            return await start_service(command, file, limit_s)
        number = listener.fileno()
        return await start_service(command, file, limit_s, variables={held.variable: str(number)}, pass_fds=[number])

    def _hold_listener(self, service: str, held: HeldSocket) -> socket.socket | None:
        """Return a service's socket, which is held from its first start to the end of the run.

        None: it cannot listen; the service will then find that out by itself, and say it.
        """
        if service not in self._listeners:
            with suppress(StartupError):
                self._listeners[service] = self._held.enter_context(load_place(held.open)(self.config))
        return self._listeners.get(service)

    def _log_files(self) -> list[tuple[str, Path]]:
        """Return what is written by processes for as long as they run, with the name of each."""
        logs = [(file.stem, file) for file in self.logs.glob("*.log")]
        own = [("nats-server", self.config.path / NATS_FOLDER / SERVER_LOG), ("up", self.config.path / SUPERVISOR_LOG)]
        return [*logs, *own]

    async def _stop_all(self) -> None:
        for phase in sorted({row.planned.phase for row in self.running}, reverse=True):
            rows = [row for row in self.running if row.planned.phase == phase and row.restarts >= 0]
            if not rows:
                continue
            for row in rows:
                row.stop(signal.SIGTERM)
            with anyio.move_on_after(max(self.config.drain_s(row.planned.service) for row in rows) + _MARGIN_S):
                for row in rows:
                    await row.ended.wait()
            for row in rows:
                if not row.ended.is_set():
                    log.warning("%s did not drain; killing it", row.planned.name)
                    send(row.process, signal.SIGKILL)
        self._write_pids()

    async def _watch_heartbeats(self, bus: Bus) -> None:
        async with aclosing(listen_to_heartbeats(bus, self.config.run)) as beats:
            async for beat in beats:
                for row in self.running:
                    if row.process and row.process.pid == beat.pid:
                        was_up = row.up
                        row.hear(beat)
                        if row.up and not row.ready.is_set():
                            row.ready.set()
                            self._report_state()
                        elif row.up and not was_up:
                            log.info("%s is ready again, pid %d", row.planned.name, beat.pid)
                evaluator = next((row for row in self.running if row.planned.service == "evaluator"), None)
                waits = evaluator is not None and not evaluator.ended.is_set()
                self._notices.hear(beat, evaluates=waits)

    async def _end_hung(self) -> None:
        """Kill each process that is hung, so that it is started again."""
        while True:
            await sleep_until_tick(_LOOK_S)
            self._memory_kills.poll(time.monotonic())
            for row in self.running if self._phase in {"starting", "running"} else ():
                process = row.process
                if process is None or process.returncode is not None or row.stopping or row.hung:
                    continue
                if not row.ready.is_set():
                    continue  # its first start, which `_ready` bounds
                silent_s = self._notices.silent_for_s(process.pid, since_s=row.started_s)
                state = state_of(process.pid, silent_s)
                ready_s = ready_within_s(self.config, [row.planned.service])
                row.hung = why_hung(SilentProcess(silent_s, state, not row.up), self.config.services.silent_s, ready_s)
                if row.hung:
                    log.warning("%s hangs, killing it: %s", row.planned.name, row.hung)
                    if row.up:
                        send(process, STACKS_SIGNAL)
                        await anyio.sleep(_STACKS_S)
                    send(process, signal.SIGKILL)

    async def _watch_held(self, held: BlockedProcesses) -> None:
        """Look where processes stand that are silent, and keep their leases. Runs until cancelled."""
        async with background() as renewing:
            while True:
                silent_s = {
                    row.process.pid: self._notices.silent_for_s(row.process.pid, since_s=row.started_s)
                    for row in self.running
                    if row.up and row.process is not None and row.process.returncode is None
                }
                found = held.check(silent_s, renewing)
                for row in self.running:
                    row.held = "" if row.process is None else found.get(row.process.pid, "")
                await sleep_until_tick(_LOOK_S)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._report_state()

    def _report_state(self) -> None:
        missing = [row.planned.name for row in self.running if not row.ready.is_set()]
        count = len(self.running)
        waits_for = missing[0] if missing else ""
        self._state.report(self._phase, count - len(missing), count, waits_for=waits_for)

    def _process_facts(self) -> Iterator[ProcessFact]:
        """Yield how each process stands; nothing once they are to stop."""
        for row in self.running if self._phase in {"starting", "running"} else ():
            if row.restarts < 0:
                continue  # those of its phase have not been started yet
            yield row.fact(self._notices.silent_for_s, log=self.logs / f"{row.planned.name}.log")

    def _write_pids(self) -> None:
        pids = {row.planned.name: row.process.pid for row in self.running if row.process}
        found = {"supervisor": os.getpid(), "nats-server": self._server.pid, **pids}
        self._pids.write(msgspec.json.format(msgspec.json.encode(found)))
