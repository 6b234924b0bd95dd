"""Checks of the run's server.

It answers, has JetStream and room, its streams are as configured, its clock is ours.
"""

import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import nats.errors

from lachesis.pipeline.access import OBSERVER
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.bus.replies import NO_LEADER, to_ns
from lachesis.pipeline.bus.streams import definitions, differences, sized
from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.config.servers import key_path, sampling_key
from lachesis.pipeline.errors import AccessError, DamagedError, InfrastructureError, NotFoundError, StartupError
from lachesis.pipeline.inference.client import InferenceClient
from lachesis.pipeline.inference.config import ClientConfig
from lachesis.pipeline.inference.directory import check_url, registered_servers
from lachesis.pipeline.telemetry.heartbeat_log import HeartbeatLog
from lachesis.schemas.errors import ConfigError, DataError
from lachesis.schemas.subjects import kind_of
from lachesis.services.preflight.cluster import check_copies
from lachesis.services.preflight.exhaustion import find_exhaustion
from lachesis.services.preflight.ledger import check_fit, check_ledger
from lachesis.services.preflight.ports import SERVER, fixed_ports
from lachesis.services.preflight.room import check_account, check_sharing, check_storage, read_monitor, try_room
from lachesis.services.run.connect import (
    CONNECT_S,
    connect_run,
    has_history,
    open_history,
    recent_heartbeats,
    server_version,
)
from lachesis.services.run.store import find_lost_store, is_lost, refuse_foreign_folder, ways_out

__all__ = ["check_server", "clock_offset_s"]

_CLOCK_WARN_S = 0.1
_CLOCK_FAIL_S = 5.0
_CLOCK_TRIES = 5
_ANSWER_S = 5.0
_SERVER_S = 2.0
_PATIENCE_S = 15.0
"""How long a cluster may take to elect a leader before that is a finding."""


async def check_server(config: RunConfig, heard: HeartbeatLog | None = None) -> list[DoctorFinding]:
    """Return every finding; a server that cannot be reached is one, too.

    `heard` is filled with the heartbeats of the run's services.
    """
    try:
        refuse_foreign_folder(config)
    except StartupError as error:
        return [fail("server", str(error), "as it says")]
    if config.nats is not None:
        patience_s, connect_s = min(config.nats.give_up_s, _PATIENCE_S), min(config.nats.connect_timeout_s, CONNECT_S)
        quick = msgspec.structs.replace(config.nats, give_up_s=patience_s, connect_timeout_s=connect_s)
        config = msgspec.structs.replace(config, nats=quick)
    try:
        bus = await connect_run(config, f"{config.run}.doctor", OBSERVER)
    except StartupError as error:
        return await _without_server(config, error)
    except (AccessError, ConfigError) as error:
        return [fail("server", str(error), "as it says, or correct nats.url, nats.user, nats.creds_file...")]
    found: list[DoctorFinding] = []
    async with bus:
        try:
            async for finding in _findings(bus, config, heard if heard is not None else HeartbeatLog()):
                found.append(finding)  # noqa: PERF401  # what was found before it fell silent is kept
        except nats.errors.Error as error:
            found.append(fail("server", f"stopped answering: {error}", "look at its log"))
    return found


async def _without_server(config: RunConfig, error: StartupError) -> list[DoctorFinding]:
    """Return what is known of a run whose server cannot be reached."""
    if has_history(config):
        ended = ok("server", f"run {config.run} has ended, so its server does not run; `lachesis up` continues it")
        return [ended, *await _look_into_ended(config), *[one async for one in _named_servers(config)]]
    if is_lost(config):
        return [fail("server", f"run {config.run} has stored history in {config.path}, and that is gone",
                     ways_out(config.run))]  # fmt: skip
    if config.nats is None:
        first = ok("server", f"no run {config.run} in {config.path.parent} yet; `lachesis up` starts it")
        return [first, *[one async for one in _named_servers(config)]]
    return [fail("server", str(error), "as it says, or correct --nats URL")]


async def _look_into_ended(config: RunConfig) -> list[DoctorFinding]:
    """Return whether what a run that has ended has stored still fits together."""
    try:
        async with open_history(config, f"{config.run}.doctor") as bus:
            return [finding async for finding in check_fit(bus, config)]
    except (StartupError, NotFoundError, InfrastructureError) as error:
        return [warn("streams fit each other", f"not known: {error}", "as it says")]


async def _findings(bus: NatsBus, config: RunConfig, heard: HeartbeatLog) -> AsyncIterator[DoctorFinding]:
    yield ok("server", f"nats-server {server_version(bus)} answers, with JetStream")
    account = await _request_time(bus, "$JS.API.INFO")
    wanted = {definition["name"]: definition for definition in definitions(config.run, config.streams)}
    answers = {name: await _request_time(bus, f"$JS.API.STREAM.INFO.{name}") for name in wanted}
    present = [name for name, info in answers.items() if "error" not in info]
    there = {name: answers[name] for name in present}
    async for finding in _storage_findings(bus, config, account, there):
        yield finding
    for copies in check_copies(answers):
        yield copies
    led = [name for name, info in answers.items() if info.get("error", {}).get("err_code") != NO_LEADER]
    sizes = {name: sized(wanted[name], answers[name]["config"], config.streams) for name in present}
    findings = [found for name in present if (found := _stream(sizes[name], answers[name])) is not None]
    for found in findings:
        yield found
    with suppress(InfrastructureError):  # reported elsewhere: there is no leader to answer
        for exhausted in await find_exhaustion(bus, config, map(kind_of, present)):
            yield exhausted
    if missing := await _missing(bus, config, set(led) - set(present)):
        yield missing
    elif not findings and present:
        yield ok("streams", f"{len(present)} streams (the bucket among them) are as configured")
    async for stored in check_ledger(bus, config, there):
        yield stored
    async for server in _inference(bus, config):
        yield server
    if present:
        listening = {one.owner for one in fixed_ports(config)} - {SERVER}
        await recent_heartbeats(bus, config.run, listening, heard)
        for shared in heard.shared_names():
            yield warn("replicas", shared.text, shared.mend)
    if present:
        yield _clock(await clock_offset_s(bus, present[0]))


async def _missing(bus: NatsBus, config: RunConfig, names: set[str]) -> DoctorFinding | None:
    """Return what of the run's streams is gone, or was never made; `names` do not answer."""
    with suppress(InfrastructureError):  # reported elsewhere: there is no leader to answer
        lost = await find_lost_store(bus, config)
        if lost is not None:
            return fail("streams", lost.text, lost.mend)
    return fail("streams", f"missing or unreadable: {', '.join(sorted(names))}", "lachesis init") if names else None


async def _inference(bus: NatsBus, config: RunConfig) -> AsyncIterator[DoctorFinding]:
    """Yield of each inference server that has registered where it is, and whether it answers who has our key."""
    servers: dict[str, str] = {}
    with suppress(InfrastructureError, NotFoundError, DamagedError):  # said elsewhere: the bucket does not answer
        servers = await registered_servers(bus, config.inference)
    for role, url in servers.items():
        yield await _inference_server(config, role, url)
    async for finding in _named_servers(config, servers):
        yield finding


async def _named_servers(config: RunConfig, registered: Collection[str] = ()) -> AsyncIterator[DoctorFinding]:
    """Yield of each inference server that the configuration names by its URL, but for roles that have registered."""
    for role, settings in config.inference.items():
        if settings.url is not None and role not in registered:
            yield await _inference_server(config, role, settings.url, named=True)


async def _inference_server(config: RunConfig, role: str, url: str, *, named: bool = False) -> DoctorFinding:
    name, path = f"inference.{role}", key_path(config, role)
    try:
        check_url(url)
    except ConfigError as error:
        return warn(name, f"is registered with what is no address: {error}", "restart the service that registers there")
    here = path is not None and path.exists()
    try:
        quick = ClientConfig(url=url, timeout=_SERVER_S, connect_timeout=_SERVER_S)
        async with InferenceClient(quick, token=sampling_key(config, role) if here else None) as client:
            there = await client.ready()
            if there:
                await client.weight_version()
    except StartupError as error:
        return fail(name, str(error), "make it readable, or name another file")
    except AccessError:
        mend = f"give inference.{role}.key_file, or copy inference/{role}.key out of the folder where the server runs"
        return fail(name, f"answers at {url}, but refuses {f'the key in {path}' if here else 'us without a key'}", mend)
    except (ConfigError, DataError, InfrastructureError):
        there = False
    if not there:
        if named:
            text = f"does not answer at {url}; until it does, what needs it waits"
            return warn(name, text, f"start it there, or correct inference.{role}.url")
        return warn(name, f"does not answer at {url}", f"look at the log of lachesis run inference.{role}")
    return ok(name, f"answers at {url}" + (f", with the key that {path} holds" if here else ""))


async def _storage_findings(
    bus: NatsBus, config: RunConfig, account: dict[str, Any], there: Mapping[str, dict[str, Any]]
) -> AsyncIterator[DoctorFinding]:
    """Yield findings on what the account and the server may store, and who has reserved how much of it."""
    problems = list(check_account(account, config.run, config.streams, there))
    for finding in problems:
        yield finding
    if "error" not in account:
        with suppress(InfrastructureError):  # reported elsewhere: there is no leader to answer
            for shared in check_sharing(await bus.reserved_bytes()):
                yield shared
    if config.nats is not None:
        storage = await read_monitor(*_server(bus))
        for finding in check_storage(storage, config.streams, there):
            yield finding
        if storage is None and not any(one.level == "FAIL" for one in problems):
            room = await try_room(bus, config.streams, config.run, there)
            if room is not None:
                yield room


def _server(bus: NatsBus) -> tuple[str, str]:
    """Return host and id of the server that the bus is connected to."""
    url = bus.client.connected_url
    server_id = bus.client._server_info.get("server_id", "")  # noqa: SLF001 - the client shows it nowhere else
    return (url.hostname or "" if url is not None else ""), server_id


def _stream(wanted: dict[str, Any], info: dict[str, Any]) -> DoctorFinding | None:
    name = f"stream {wanted['name']}"
    changed = differences(info["config"], wanted)
    if changed:
        text = ", ".join(f"{key} is {now}, should be {then}" for key, (now, then) in sorted(changed.items()))
        return fail(name, text, "lachesis init")
    return None


async def clock_offset_s(bus: NatsBus, stream: str) -> float:
    """Return the server's clock minus ours, seconds, by the quickest of a few answers.

    Off by half its time at most.
    """
    samples = []
    for _ in range(_CLOCK_TRIES):
        before_ns = time.time_ns()
        info = await _request_time(bus, f"$JS.API.STREAM.INFO.{stream}")
        after_ns = time.time_ns()
        samples.append((after_ns - before_ns, to_ns(info["ts"]) - (before_ns + after_ns) // 2))
    return min(samples)[1] / 1e9


def _clock(offset: float) -> DoctorFinding:
    text = f"the server's clock is {abs(offset) * 1e3:.2f} ms {'ahead' if offset > 0 else 'behind'}"
    mend = "let a time service (chrony, systemd-timesyncd) run on both machines"
    if abs(offset) > _CLOCK_FAIL_S:
        return fail("clock", text, mend)
    if abs(offset) > _CLOCK_WARN_S:
        return warn("clock", f"{text}; waits in queues will look wrong by that", mend)
    return ok("clock", text)


async def _request_time(bus: NatsBus, subject: str) -> dict[str, Any]:
    answer = await bus.client.request(subject, b"", timeout=_ANSWER_S)
    found: dict[str, Any] = msgspec.json.decode(answer.data)
    return found
