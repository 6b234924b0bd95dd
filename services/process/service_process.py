"""Runs a service's process: connects, announces, works, drains on request, and says why it ended.

Several services can share it (`services.together`): a task group with one connection. One that fails ends the process,
so that its exit code and its restart are the supervisor's, as those of a process of one service are.

It drains on SIGTERM and SIGINT and, under a supervisor, once its standard input ends, which it does however the
supervisor dies; either way within `services.drain_s` (the trainer: `training.drain_s`).

Exit codes: 0 its work is finished, or it drained on request, 1 a bug (traceback), 2 cannot start (the message says
what to do), 3 fenced by another writer, 4 the drain took too long (`drain_limit` ends what cannot be cancelled), 5
drained under a supervisor, 6 the server refused its credentials, 7 a setting was changed that stored data depends on,
8 a disk was full where it could not wait for room, 9 another rank of the trainer was lost, 10 the code that it runs
failed, group after group or by ending the process, 11 a step of the trainer does not fit into memory, 12 the server
does not permit it a subject, 13 a server over HTTP refused its key, 14 the server lost history. A supervisor believes
a code only if the process has noted it (`exit_note`).
"""

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from lachesis.pipeline.access import identity_of
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.disk import is_disk_full
from lachesis.pipeline.common.late_output import flush_output, keep_output
from lachesis.pipeline.common.os_errors import explain_os_error
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.common.user_code import describe_ending, is_ending, mark_own_process, refuse_forked
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import (
    AccessError,
    ApiKeyError,
    CheckpointError,
    EnvironmentCodeError,
    FencedError,
    HistoryLostError,
    LedgerError,
    OutOfMemoryError,
    PermissionDeniedError,
    RankLostError,
    SettingsChangedError,
    StartupError,
    StoredValueError,
    StreamMissingError,
    leaves,
)
from lachesis.pipeline.extension import ServiceSpec
from lachesis.pipeline.runtime.blocked_interpreter import INTERPRETER_HOLDS
from lachesis.pipeline.runtime.blocked_loop import speaking_while_held
from lachesis.pipeline.runtime.exit_note import is_supervised_by_socket, note_exit
from lachesis.pipeline.runtime.service import Service, open_service
from lachesis.pipeline.telemetry.tracing import Tracing
from lachesis.pipeline.trainer.ranks.place import RankPlace
from lachesis.schemas.errors import ConfigError, VersionError
from lachesis.services.preflight.budget_check import check_budgets
from lachesis.services.process.drain_limit import limited_drain
from lachesis.services.process.forked_children import separate_forked_children, tell_returned_forks
from lachesis.services.process.nats_micro import join_micro
from lachesis.services.process.process_limits import report_limits
from lachesis.services.process.replica import claim_replica
from lachesis.services.process.role import ProcessRole, log_to_stderr, logged_as
from lachesis.services.process.single_writer import WriterPlace, refuse_writers_beside
from lachesis.services.process.telemetry import follow_clock, open_tracing
from lachesis.services.registry import Stage, load_stage, service_of
from lachesis.services.run.connect import connect_run

__all__ = [
    "EXIT_API_KEY",
    "EXIT_DRAINED",
    "EXIT_DRAIN_TIMEOUT",
    "EXIT_FENCED",
    "EXIT_HISTORY_LOST",
    "EXIT_NOT_PERMITTED",
    "EXIT_NO_MEMORY",
    "EXIT_NO_ROOM",
    "EXIT_OWN_CODE",
    "EXIT_RANK_LOST",
    "EXIT_REFUSED",
    "EXIT_SETTINGS_CHANGED",
    "EXIT_STARTUP",
    "STACKS_SIGNAL",
    "run_process",
]

EXIT_STARTUP = 2
EXIT_FENCED = 3
EXIT_DRAIN_TIMEOUT = 4
EXIT_DRAINED = 5
EXIT_REFUSED = 6
EXIT_SETTINGS_CHANGED = 7
EXIT_NO_ROOM = 8
EXIT_RANK_LOST = 9
EXIT_OWN_CODE = 10
EXIT_NO_MEMORY = 11
EXIT_NOT_PERMITTED = 12
EXIT_API_KEY = 13
EXIT_HISTORY_LOST = 14

STACKS_SIGNAL = signal.SIGUSR2
"""Makes a service write into its log where each of its threads stands."""

log = logging.getLogger("lachesis")

_MARGIN_S = 2.0
"""Seconds beyond its drain after which a process that cannot be stopped ends itself."""
_REFUSALS = (
    StartupError,
    ConfigError,
    LedgerError,
    CheckpointError,
    StoredValueError,
    StreamMissingError,
    VersionError,
)
"""What a person has to mend; the text says how."""


@dataclass(frozen=True, slots=True)
class _Hosted:
    """One service of this process."""

    spec: ServiceSpec
    name: str
    part: str
    identity: str
    replica: str
    stage: Stage
    tracing: Tracing


def run_process(role: ProcessRole, config: RunConfig) -> int:
    """Run one service until it is requested to stop; note the exit code for its supervisor and return it."""
    keep_output()
    if role.supervised:
        is_supervised_by_socket()
    faulthandler.enable()
    mark_own_process(role.name)
    code = _run_to_the_end(role, config)
    note_exit(code)
    return code


def _run_to_the_end(role: ProcessRole, config: RunConfig) -> int:
    log_to_stderr(role.name)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    faulthandler.register(STACKS_SIGNAL, all_threads=True)
    try:
        place = RankPlace.of(config.training, os.environ) if "trainer" in role.services else RankPlace()
        if place.rank:
            return anyio.run(_follow_leader, config, place)
        if "governor" in role.services:  # it is what budgets that are too small would stop for good
            check_budgets(config)
        with ExitStack() as opened:
            hosted = [opened.enter_context(_open_hosted(role, spec, config)) for spec in role.specs]
            return anyio.run(_run, role, hosted, config)
    except Exception as error:  # noqa: BLE001 - it is explained, and ends the process
        return _explain(error)
    except BaseException as error:
        refuse_forked("code that it runs")
        if not any(map(is_ending, leaves(error))):
            raise
        log.error("code that it runs %s", describe_ending(error))  # noqa: TRY400 - it has the place
        return EXIT_OWN_CODE


def _explain(error: BaseException) -> int:
    """Log what ended the service and return the exit code: expected ends as one line each, bugs as a traceback."""
    ended_by: list[BaseException] = leaves(error)
    missing: list[BaseException] = [leaf for leaf in ended_by if isinstance(leaf, StreamMissingError)]
    ended_by = missing or ended_by  # what else failed did so for lack of that
    ends = (
        ((FencedError,), EXIT_FENCED),
        ((PermissionDeniedError,), EXIT_NOT_PERMITTED),
        ((ApiKeyError,), EXIT_API_KEY),
        ((AccessError,), EXIT_REFUSED),
        ((SettingsChangedError,), EXIT_SETTINGS_CHANGED),
        ((OutOfMemoryError,), EXIT_NO_MEMORY),
        ((RankLostError,), EXIT_RANK_LOST),
        ((EnvironmentCodeError,), EXIT_OWN_CODE),
        ((HistoryLostError,), EXIT_HISTORY_LOST),
        (_REFUSALS, EXIT_STARTUP),
    )
    for kinds, code in ends:
        expected = [leaf for leaf in ended_by if isinstance(leaf, kinds)]
        if expected and len(expected) == len(ended_by):
            for text in dict.fromkeys(str(leaf) for leaf in expected):  # several tasks may have met the same end
                log.error("%s", text)
            return code
    if all(is_disk_full(leaf) for leaf in ended_by):
        for text in dict.fromkeys(str(leaf) for leaf in ended_by):
            log.error("%s: make room on that disk; what was not finished is done again", text)
        return EXIT_NO_ROOM
    mendable = [found for leaf in ended_by if (found := explain_os_error(leaf)) is not None]
    if len(mendable) == len(ended_by):
        for text in dict.fromkeys(mendable):
            log.error("%s", text)
        return EXIT_STARTUP
    log.error("ended by an unexpected error", exc_info=error)
    return 1


@contextmanager
def _open_hosted(role: ProcessRole, spec: ServiceSpec, config: RunConfig) -> Iterator[_Hosted]:
    name = role.speaker(spec)
    with (
        claim_replica(config.run, name, role.number, supervised=role.supervised) as replica,
        open_tracing(config, name, replica) as tracing,
    ):
        stage = load_stage(service_of(config, spec.name, role.part))
        yield _Hosted(spec, name, role.part, role.identity(spec), replica, stage, tracing)


async def _run(role: ProcessRole, hosted: Sequence[_Hosted], config: RunConfig) -> int:
    limit_s = max(map(config.drain_s, role.services)) + _MARGIN_S
    async with _told_to_drain(supervised=role.supervised) as drain_event:
        with limited_drain(limit_s, EXIT_DRAIN_TIMEOUT, supervised=role.supervised):
            code = await _connect_and_serve(role, hosted, config, drain_event)
    return 0 if code == EXIT_DRAINED and not role.supervised else code


async def _connect_and_serve(
    role: ProcessRole, hosted: Sequence[_Hosted], config: RunConfig, drain_event: anyio.Event
) -> int:
    async with AsyncExitStack() as connected:
        buses = await _connect(connected, role, hosted, config, drain_event)
        if len(buses) < len(hosted):
            return EXIT_DRAINED
        for bus, one in zip(buses, hosted, strict=True):
            if not await _is_alone(bus, one.name, config, drain_event, supervised=role.supervised):
                return EXIT_DRAINED
        return await _serve(buses, role, hosted, config, drain_event)


async def _follow_leader(config: RunConfig, place: RankPlace) -> int:
    """Run a rank of the trainer that is not the service: it takes its orders from the one that is, its end too."""
    from lachesis.pipeline.trainer.ranks.follower import follow_leader

    with anyio.open_signal_receiver(*stop_signals()):  # what all ranks get is for rank 0 to heed
        async with (
            await connect_run(config, f"{config.run}.trainer-rank-{place.rank}", identity_of("trainer", "")) as bus,
            background() as tasks,
        ):
            tasks.start_soon(flush_output)
            tasks.start_soon(bus.keep_served)
            await follow_leader(bus, config.training, place)
    return 0


async def _serve(
    buses: Sequence[NatsBus],
    role: ProcessRole,
    hosted: Sequence[_Hosted],
    config: RunConfig,
    drain_event: anyio.Event,
) -> int:
    """Run all services; the first that fails ends the others, whose work is done again."""
    place = WriterPlace.current(config.path, supervised=role.supervised)
    codes: list[int] = []
    clock = hosted[0].tracing.clock
    for one in hosted:
        one.tracing.clock = clock  # a process is on one machine, and measures its clock once
    async with background() as tasks:
        tasks.start_soon(flush_output)
        tasks.start_soon(follow_clock, buses[0], clock)
        for bus in dict.fromkeys(buses):
            tasks.start_soon(bus.keep_served)
        with INTERPRETER_HOLDS.watched():
            async with anyio.create_task_group() as serving:
                for bus, one in zip(buses, hosted, strict=True):
                    serve = partial(_serve_one, bus, one, config, place=place, drain_event=drain_event, codes=codes)
                    serving.start_soon(partial(serve, watches_process=one is hosted[0]))
    return EXIT_DRAIN_TIMEOUT if EXIT_DRAIN_TIMEOUT in codes else max(codes)


async def _serve_one(
    bus: NatsBus,
    one: _Hosted,
    config: RunConfig,
    *,
    place: WriterPlace,
    drain_event: anyio.Event,
    codes: list[int],
    watches_process: bool,
) -> None:
    """Run one service, and add to `codes` the exit code of a process that is this service alone.

    `watches_process`: whether it also says what is wrong with the process that it runs in.
    """
    drain_s = config.drain_s(one.spec.name)
    with logged_as(one.name):
        async with (
            open_service(
                bus,
                one.name,
                config.run,
                config.revision,
                replica=one.replica,
                tracing=one.tracing,
                alive_file=None if config.services.alive_file is None else Path(config.services.alive_file),
            ) as service,
            anyio.create_task_group() as tasks,
        ):
            service.held_limit_s = config.services.silent_s
            if watches_process:
                tasks.start_soon(tell_returned_forks, service)
                tasks.start_soon(report_limits, service)
            tasks.start_soon(join_micro, bus, service, one.spec.about, place)
            late = anyio.Event()
            tasks.start_soon(_drain_when, drain_event, service)
            tasks.start_soon(_cancel_when_late, service, drain_s, tasks.cancel_scope, late)
            log.info("started, pid %s, replica %s", os.getpid(), one.replica)
            async with speaking_while_held(service):
                await one.stage(service, config, one.part)
            tasks.cancel_scope.cancel()
        if late.is_set():
            log.error("stopped: the drain took longer than %s s; what was not finished is done again", drain_s)
            codes.append(EXIT_DRAIN_TIMEOUT)
            return
        drained = service.draining.is_set()
        log.info("drained" if drained else "finished")
        codes.append(EXIT_DRAINED if drained else 0)


async def _connect(
    connected: AsyncExitStack,
    role: ProcessRole,
    hosted: Sequence[_Hosted],
    config: RunConfig,
    drain_event: anyio.Event,
) -> list[NatsBus]:
    """Return the bus of each service, fewer if the process was requested to drain while there was no server yet.

    Services that share a process share its connection, unless each has a key of its own: then each may still do only
    what its key permits. `connected` closes them.
    """
    own_keys = config.nats is not None and config.nats.nkey_folder is not None
    buses: list[NatsBus] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_when, drain_event, tasks.cancel_scope)
        for one in hosted:
            if own_keys or not buses:
                name = one.name if own_keys else role.name
                bus = await connect_run(config, f"{config.run}.{name}", one.identity)
                await connected.enter_async_context(bus)
            buses.append(bus)
        tasks.cancel_scope.cancel()
    return buses


async def _is_alone(bus: NatsBus, name: str, config: RunConfig, drain_event: anyio.Event, *, supervised: bool) -> bool:
    """Return True once no other process writes what this one does, False if it was requested to drain while it waited.

    A supervisor has made sure of it before it starts any. Raises StartupError.
    """
    alone = supervised
    if not alone:
        async with background() as tasks:
            tasks.start_soon(_cancel_when, drain_event, tasks.cancel_scope)
            await refuse_writers_beside(bus, config, [name])
            alone = True
    return alone


@asynccontextmanager
async def _told_to_drain(*, supervised: bool) -> AsyncIterator[anyio.Event]:
    """Yield what is set once the process is requested to drain, by a signal or by its supervisor's end."""
    drain_event = anyio.Event()
    async with anyio.create_task_group() as tasks:
        await tasks.start(_tell_on_signal, drain_event)
        if supervised:
            tasks.start_soon(_tell_without_supervisor, drain_event)
        yield drain_event
        tasks.cancel_scope.cancel()


async def _tell_on_signal(drain_event: anyio.Event, *, task_status: TaskStatus[None]) -> None:
    separate_forked_children()
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        task_status.started()
        async for number in signals:
            log.info("draining on %s", number.name)
            drain_event.set()


async def _tell_without_supervisor(drain_event: anyio.Event) -> None:
    """Notify once standard input, which the supervisor holds open, has ended."""
    try:
        await anyio.wait_readable(sys.stdin)
        while os.read(sys.stdin.fileno(), 4096):
            await anyio.wait_readable(sys.stdin)
    except (ConnectionResetError, PermissionError):
        pass  # it died with something unread; or this is a file, which no process holds open
    log.warning("draining: the supervisor is gone")
    drain_event.set()


async def _cancel_when(drain_event: anyio.Event, scope: anyio.CancelScope) -> None:
    await drain_event.wait()
    scope.cancel()


async def _drain_when(drain_event: anyio.Event, service: Service) -> None:
    await drain_event.wait()
    service.drain()


async def _cancel_when_late(service: Service, deadline_s: float, scope: anyio.CancelScope, late: anyio.Event) -> None:
    await service.draining.wait()
    await anyio.sleep(deadline_s)
    late.set()
    scope.cancel()
