"""Finding a run's server: the configured one, or the embedded one of the run's folder."""

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from lachesis.pipeline.access import OBSERVER, OPERATOR
from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.bus.config import ConnectionConfig, ServerConfig
from lachesis.pipeline.bus.connection import connect, for_identity
from lachesis.pipeline.bus.embedded import SERVER_LOG, EmbeddedServer, StoreInUseError, read_endpoint
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.last_event import read_last_event
from lachesis.pipeline.bus.newer_writers import hear_all_writers
from lachesis.pipeline.config.extended import run_config_type
from lachesis.pipeline.config.run import NATS_FOLDER, RunConfig
from lachesis.pipeline.errors import DamagedError, InfrastructureError, NotFoundError, StartupError
from lachesis.pipeline.runtime.heartbeats import listen_to_heartbeats
from lachesis.pipeline.telemetry.heartbeat_log import SILENCE_S, HeartbeatLog
from lachesis.schemas import subjects
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.ledger import TrainReport
from lachesis.services.run.known_runs import known_runs
from lachesis.services.run.store import find_lost_store, is_lost, make_streams, ways_out

__all__ = [
    "CONNECT_S",
    "NATS_FOLDER",
    "SILENCE_S",
    "RunHistory",
    "check_known",
    "check_there",
    "connect_run",
    "has_ended",
    "has_history",
    "is_trained",
    "open_history",
    "open_run",
    "other_runs",
    "recent_heartbeats",
    "server_config_for_history",
    "server_version",
    "unknown_run",
    "until_ended",
]

log = logging.getLogger("lachesis")

_HEARTBEATS_S = 1.5
"""Longer than the second between two heartbeats of a service."""
_NAMESAKES_S = 2.0
"""Long enough to hear two heartbeats of a process, and so whether two of one name speak in turn."""
CONNECT_S = 3.0
"""What a command that looks once waits for one answer of the server, seconds: then it shows what it has, and why."""


class RunHistory(NamedTuple):
    """A run to be looked at. `ended`: its own server does not run, so nothing of it does."""

    bus: NatsBus
    ended: bool


async def connect_run(
    config: RunConfig,
    name: str,
    identity: str,
    *,
    patience_s: float | None = None,
    connect_s: float | None = None,
    needs_jetstream: bool = True,
) -> NatsBus:
    """Return the bus, to be used as a context.

    `name` is shown in the server's own monitoring, `identity` (a service, `access.OPERATOR` or `access.OBSERVER`) says
    whose key is used where the run has keys. `patience_s` bounds what one call waits for the server, `connect_s` only
    how long it is looked for at first; without `needs_jetstream` what it stores may be out of reach.

    Raises `StartupError` when there is no server or an unfit one, `AccessError` when it refuses the credentials.
    """
    settings = ConnectionConfig() if config.nats is None else for_identity(config.nats, identity)
    if patience_s is not None:
        settings = msgspec.structs.replace(settings, give_up_s=patience_s)
    if (first_s := connect_s or patience_s) is not None:
        settings = msgspec.structs.replace(settings, connect_timeout_s=first_s)
    if config.nats is not None:
        bus = await connect(run=config.run, name=name, config=settings, needs_jetstream=needs_jetstream)
        bus.keep_acknowledged(config.path)
        return bus
    try:
        endpoint = read_endpoint(config.path / NATS_FOLDER)
    except StartupError as error:
        raise StartupError(f"{_no_server(config)}, or name a server with --nats URL") from error
    bus = await connect(
        endpoint.url,
        run=config.run,
        name=name,
        token=endpoint.token,
        config=settings,
        needs_jetstream=needs_jetstream,
    )
    bus.keep_acknowledged(config.path)
    return bus


def _no_server(config: RunConfig) -> str:
    if has_history(config):
        return f"no server runs in {config.path}: start the run with `lachesis up`"
    if is_lost(config):
        return f"run {config.run} has stored history in {config.path}, and that is gone. {ways_out(config.run)}"
    others = ", ".join(_other_runs_of(config.path)) or "none"
    if config == run_config_type()():
        return (
            f"no run is named, and none in {config.path.parent} is called {config.run!r} (runs that are known: "
            f"{others}): give --run or --config, or start one with `lachesis up`"
        )
    return (
        f"there is no run {config.run} in {config.path.parent}, nor was one started elsewhere (runs that are known: "
        f"{others}): start it with `lachesis up`, or name another with --run or --config"
    )


def _other_runs_of(folder: Path) -> list[str]:
    """Return the names of the runs whose folders are where `folder` is or would be, and of those started elsewhere."""
    beside = {store.parent.parent.name for store in folder.parent.glob(f"*/{NATS_FOLDER}/jetstream")}
    return sorted(beside | {record.run for record in known_runs()})


def has_history(config: RunConfig) -> bool:
    """Whether the run has a server of its own, and that has run here before."""
    return config.nats is None and (config.path / NATS_FOLDER / "jetstream").is_dir()


async def until_ended(bus: Bus, config: RunConfig) -> None:
    """Return once the run has ended.

    With its own server, or, where it has another one, as `has_ended` says.
    """
    while True:
        with suppress(InfrastructureError):  # the server is unavailable: its content is requested again
            if await has_ended(bus, config):
                return
        await anyio.sleep(1.0)


async def has_ended(bus: Bus, config: RunConfig) -> bool:
    """Whether nothing of the run goes on: its own server was stopped.

    Or, where it has another one, its last step is on record and no service speaks any more, for which they are listened
    to for some seconds.
    """
    if config.nats is None:
        return not (config.path / NATS_FOLDER / "endpoint.json").exists()
    return await is_trained(bus, config) and await _is_silent(bus, config.run)


async def is_trained(bus: Bus, config: RunConfig) -> bool:
    """Whether all the requested steps are taken, durable and reported."""
    steps, subject = config.training.steps, subjects.state(config.run, "trainer", subjects.LIVE, config.training.name)
    if steps is None:
        return False
    try:
        report, _, _ = await read_last_event(
            bus, subjects.LEDGER, subject, TrainReport, lambda one: one.run == config.run
        )
    except (NotFoundError, SchemaError, DamagedError):
        return False  # no stream yet, another build's report, or one that cannot be read: it is not known to be
    return report is not None and report.step >= steps


async def _is_silent(bus: Bus, run: str) -> bool:
    async with bus.listen(subjects.heartbeat(run)) as beats:
        with anyio.move_on_after(SILENCE_S) as silence:
            await anext(aiter(beats))
    return silence.cancelled_caught


@asynccontextmanager
async def open_run(
    config: RunConfig,
    name: str,
    identity: str = OBSERVER,
    *,
    create: bool = False,
    patience_s: float | None = None,
    connect_s: float | None = None,
    needs_jetstream: bool = True,
) -> AsyncIterator[RunHistory]:
    """Yield a run to look at, with a bus that may do with its history what `identity` may.

    A run that has ended and whose server was its own is read from its folder, by a server that lives as long as the
    context. With `create` that makes the streams as well, for a run that has neither a server nor a folder too. Raises
    as `connect_run`, and, unless it is to be made, `NotFoundError` when the server has other runs and knows nothing of
    this one. `patience_s`, `connect_s` and `needs_jetstream` as there; without the latter it is not checked whether the
    run is known.
    """
    async with AsyncExitStack() as stack:
        ended = False
        try:
            bus = await connect_run(
                config, name, identity, patience_s=patience_s, connect_s=connect_s, needs_jetstream=needs_jetstream
            )
        except StartupError:
            if not has_history(config) and (config.nats is not None or not create):
                raise
            ended = True
            log.info("no server runs in %s: reading its history with a server of my own", config.path)
            settings = server_config_for_history(config)
            if patience_s is not None:  # it only reads: it may be killed at any moment
                settings = msgspec.structs.replace(settings, stop_timeout_s=patience_s)
            try:
                server = await stack.enter_async_context(EmbeddedServer(config.path / NATS_FOLDER, settings))
            except StoreInUseError as error:
                raise _unanswering(config, error) from error
            bus = await connect(server.url, run=config.run, name=name, token=server.token)
            bus.keep_acknowledged(config.path)
        await stack.enter_async_context(bus)
        if identity in {OBSERVER, OPERATOR}:
            hear_all_writers(bus)
        if not create and needs_jetstream:
            await _tell_lost(bus, config)
            await check_known(bus, config.run, await other_runs(bus, config))
        elif create and (ended or not await bus.describe_streams()):
            await make_streams(bus, config)
        yield RunHistory(bus, ended)


async def _tell_lost(bus: NatsBus, config: RunConfig) -> None:
    """Say what is gone of the run's store. What is left of it can be read."""
    with suppress(InfrastructureError):
        lost = await find_lost_store(bus, config)
        if lost is not None:
            log.error("%s. %s", lost.text, lost.mend)


def _unanswering(config: RunConfig, in_use: StoreInUseError) -> StartupError:
    """Return what is wrong where the run's own server runs and did not answer; else the error that it is."""
    try:
        endpoint = read_endpoint(config.path / NATS_FOLDER)
    except StartupError:
        return in_use
    log_file = config.path / NATS_FOLDER / SERVER_LOG
    return StartupError(
        f"the run's server (pid {endpoint.pid}, {endpoint.url}) runs and does not answer. If it was stopped, "
        f"`kill -CONT {endpoint.pid}` lets it go on; else its log, {log_file}, says more"
    )


@asynccontextmanager
async def open_history(
    config: RunConfig, name: str, identity: str = OBSERVER, *, patience_s: float | None = None
) -> AsyncIterator[NatsBus]:
    """Yield the bus of `open_run`, for what does not care whether the run goes on. Raises as it does."""
    async with open_run(config, name, identity, patience_s=patience_s) as history:
        yield history.bus


def server_config_for_history(config: RunConfig) -> ServerConfig:
    """Return how a server is started for the history of a run: with room for what its streams may hold."""
    room = max(config.server.file_bytes(), config.streams.total_bytes() * 5 // 4)
    return msgspec.structs.replace(config.server, max_file_bytes=room)


def server_version(bus: NatsBus) -> str:
    """Return the version of the server that the bus is connected to."""
    version = bus.client.connected_server_version
    return f"{version.major}.{version.minor}.{version.patch}"


async def other_runs(bus: NatsBus, config: RunConfig) -> list[str]:
    """Return the runs that the server has if it has no streams of this one, else nothing.

    Raises as `NatsBus.runs`.
    """
    runs = await bus.runs()
    return [] if config.run in runs else runs


def unknown_run(run: str, others: Collection[str]) -> NotFoundError:
    """Return the error that says that the server has other runs."""
    return NotFoundError(f"the server knows no run {run}; it has {', '.join(others)}: name one with --run")


async def check_known(bus: Bus, run: str, others: Collection[str]) -> None:
    """Raise `NotFoundError` if the server knows other runs but not this one.

    `others` are `other_runs`.
    """
    if not others:
        return
    with anyio.move_on_after(SILENCE_S):
        async with bus.listen(subjects.heartbeat(run)) as beats:
            await anext(aiter(beats))
            return
    raise unknown_run(run, others)


async def check_there(config: RunConfig, name: str) -> None:
    """Raise `StartupError` or `NotFoundError` if there is no such run yet; `name`: as in `connect_run`."""
    if config.nats is not None:
        async with await connect_run(config, name, OBSERVER, patience_s=CONNECT_S) as bus:
            await check_known(bus, config.run, await other_runs(bus, config))
    elif not has_history(config):
        try:
            read_endpoint(config.path / NATS_FOLDER)
        except StartupError as error:
            raise StartupError(f"{_no_server(config)}, or name a server with --nats URL") from error


async def recent_heartbeats(
    bus: Bus,
    run: str,
    awaited: Collection[str],
    log: HeartbeatLog | None = None,
    *,
    silence_s: float = SILENCE_S,
) -> list[Heartbeat]:
    """Listen for a moment and return the newest heartbeat of each instance.

    They are in the order of each instance's first heartbeat.

    Listens for `silence_s` while one of the services `awaited` has not spoken. `log` is filled meanwhile, for a caller
    that may not wait until the end.
    """
    log = HeartbeatLog() if log is None else log
    missing = set(awaited)
    start_s = anyio.current_time()
    with anyio.move_on_after(silence_s if missing else _HEARTBEATS_S) as listening:
        async with aclosing(listen_to_heartbeats(bus, run)) as beats:
            async for beat in beats:
                log.add(beat, anyio.current_time())
                missing.discard(beat.service)
                if not missing:
                    least_s = _NAMESAKES_S if log.has_namesakes() else _HEARTBEATS_S
                    listening.deadline = start_s + min(silence_s, least_s)
    return log.newest()
