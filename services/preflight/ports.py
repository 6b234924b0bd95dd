"""Checks that the fixed ports can be listened on, at the addresses that the configuration names.

Guarantees that a port which the run's own process holds is no finding, and that one which no process of the run will
listen on is not looked at.
"""

import errno
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

from lachesis.pipeline.common.doctor_finding import DoctorFinding, fail, ok, warn
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.planned_processes import planned_processes
from lachesis.services.registry import find

__all__ = ["SERVER", "FixedPort", "check_ports", "fixed_ports"]

SERVER = "nats-server"
"""What the run's own server is called among the services that listen."""


class FixedPort(NamedTuple):
    """A port that `owner`, a service of the run, is to listen on. `setting`: what names it."""

    setting: str
    host: str
    port: int
    owner: str


def fixed_ports(config: RunConfig) -> list[FixedPort]:
    """Return the ports that processes of the run are to listen on, but for those that may be any."""
    found = []
    for row in planned_processes(config):
        if row.service == "inference":
            role, name = config.role(row.part), f"inference.{row.part}.port"
            port = role.port
            elsewhere = config.trains_elsewhere("inference", row.part)
            if not port and row.part == "policy" and elsewhere is not None:
                port, name = config.at(elsewhere.port, 0), elsewhere.port
            found.append(FixedPort(name, role.host, port, f"inference-{row.part}"))
        elif (held := find(row.services[0]).socket) is not None:
            host, port = config.at(f"{held.table}.host", ""), config.at(f"{held.table}.port", 0)
            found.append(FixedPort(f"{held.table}.port", host, port, row.service))
    if config.nats is None:
        found.append(FixedPort("server.port", config.server.host, config.server.port or 0, SERVER))
    return [one for one in found if one.port]


def check_ports(config: RunConfig, running: Collection[str] = ()) -> Iterator[DoctorFinding]:
    """Yield a finding for each fixed port. `running`: the services that run already, and hold theirs."""
    wanted = fixed_ports(config)
    if not wanted:
        yield ok("ports", "none is fixed; free ones are used")
    for one in wanted:
        others = [other for other in wanted if other.setting != one.setting and other.port == one.port]
        if others:
            text = f"{one.setting} {one.port} is {others[0].setting} too"
            yield fail("ports", text, f"choose another --set {one.setting}=")
        else:
            yield _listen(one, config, runs=one.owner in running)


def _listen(one: FixedPort, config: RunConfig, *, runs: bool) -> DoctorFinding:
    name, host = f"{one.setting} {one.port}", one.setting.rpartition(".")[0] + ".host"
    problem = _problem(one.host, one.port)
    if problem is None:
        return ok("ports", f"{name} is free on {one.host}")
    if problem == errno.EADDRINUSE:
        if runs:
            return ok("ports", f"{name} is taken on {one.host}, by this run's {one.owner}")
        mend = f"stop it, or choose another --set {one.setting}="
        return fail("ports", f"{name} is taken on {one.host} by another program", mend)
    if problem == errno.EACCES:
        text = f"this user may not listen on {name}"
        return fail("ports", text, f"choose one above 1023 --set {one.setting}=, or allow it to this user")
    text = f"{host} is {one.host!r}, where this machine cannot listen ({_words(problem)})"
    mend = f"set {host} to an address of this machine, or 0.0.0.0 for all of them"
    if config.nats is None or one.owner == SERVER:
        return fail("ports", text, mend)
    return warn("ports", f"{text}; {name} is not tried", f"start {one.owner} on the machine that has it, or {mend}")


def _problem(host: str, port: int) -> int | None:
    """Return the number of the error with which a port cannot be listened on, None where it can be."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return errno.EADDRNOTAVAIL
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            return error.errno or errno.EADDRNOTAVAIL
    return None


def _words(number: int) -> str:
    return os.strerror(number)
