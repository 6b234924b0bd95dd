"""Keeps the fork servers of a run for its supervisor.

There is one of each kind, and each process is requested from one. Nothing depends on them: if one does not answer, the
service starts without it. Fork servers of a supervisor that was killed are taken over, if this one would have started
them just the same.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process, TaskGroup, TaskStatus

from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.config.shared_processes import services_in
from lachesis.pipeline.runtime.exit_note import read_exit_note
from lachesis.services.supervisor.child import ServiceProcess, send_signal
from lachesis.services.supervisor.forkserver import (
    BECOMES,
    MAX_REQUEST_BYTES,
    PRELOADED,
    ForkRequest,
    ForkServerOutdated,
    ForkServerReady,
    ForkStarted,
    Message,
    address,
)

__all__ = ["ForkServers", "SpawnedProcess", "start_service"]

log = logging.getLogger("lachesis")

_RETRY_S = 5.0
"""Between two starts of a fork server of one kind, at least."""
_ANSWER_S = 5.0
"""What a fork server may take to fork, or to say how a child of its ended, before it is taken for stuck."""
_IMPORT_S = 60.0
"""Seconds that it may take to import everything."""


class SpawnedProcess:
    """A process that was started without a fork server, with the part of anyio's `Process` that a supervisor needs."""

    def __init__(self, process: Process, stdin: socket.socket) -> None:
        self.pid = process.pid
        self.noted: int | None = None
        """The exit code that it has noted, once it has ended."""
        self._process = process
        self._stdin = stdin

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end and return its exit code."""
        code = await self._process.wait()
        if self._stdin.fileno() >= 0:
            self.noted = read_exit_note(self._stdin.fileno(), self.pid)
            self._stdin.close()
        return code

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class _AdoptedProcess:
    """A fork server that another supervisor has started: what is needed of anyio's `Process`.

    Raises `ProcessLookupError` when it has ended.
    """

    returncode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def kill(self) -> None:
        send_signal(self._pidfd, signal.SIGKILL)

    async def aclose(self) -> None:
        await anyio.wait_readable(self._pidfd)
        os.close(self._pidfd)


@dataclass(slots=True)
class _PendingFork:
    """A request under way, and the channel of the reaper that was forked."""

    channel: socket.socket | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)


class _ForkServerProcess:
    """One fork server, from its start, or from being taken over, to its end."""

    def __init__(self, process: Process | _AdoptedProcess, requests: socket.socket) -> None:
        self.process = process
        self.unfit = anyio.Event()
        """Set once it is no longer to be used."""
        self.outdated = False
        self._ready = anyio.Event()
        self._requests = requests
        self._asking = anyio.Lock()
        self._asked: _PendingFork | None = None

    async def listen(self) -> None:
        """Take in what it says until it ends."""
        try:
            while message := await self._receive():
                data, passed = message
                match msgspec.json.decode(data, type=Message):
                    case ForkServerReady():
                        self._ready.set()
                    case ForkServerOutdated():
                        self._retire()
                    case ForkStarted() if self._asked is not None and passed:  # else no file descriptor was left
                        self._asked.channel = socket.socket(fileno=passed[0])
                        self._asked.answered.set()
        finally:
            self._be_unfit()
            self._ready.set()
            self._requests.close()
            with anyio.CancelScope(shield=True):
                if self.process.returncode is None:
                    self.process.kill()
                await self.process.aclose()

    async def _receive(self) -> tuple[bytes, list[int]] | None:
        await anyio.wait_readable(self._requests)
        try:
            data, passed, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, 1)
        except ConnectionResetError:
            return None
        return (data, passed) if data else None

    async def fork(self, reported: ForkRequest) -> ServiceProcess | None:
        """Return the requested process, once everything is imported. None: the server cannot, or does not answer and is
        ended."""
        async with self._asking:
            with anyio.move_on_after(_IMPORT_S):
                await self._ready.wait()
            if self.unfit.is_set():
                return None
            theirs, ours = (one.detach() for one in socket.socketpair())
            asked = self._asked = _PendingFork()
            with anyio.CancelScope(shield=True):  # what was begun is the caller's, whatever happens
                try:
                    socket.send_fds(self._requests, [msgspec.json.encode(reported)], [theirs])
                    with anyio.move_on_after(_ANSWER_S):
                        await asked.answered.wait()
                except OSError:
                    pass  # it has just died
                finally:
                    os.close(theirs)
                self._asked = None
                if asked.channel is not None:
                    return await ServiceProcess.open(asked.channel, ours)
            os.close(ours)  # should it fork after all, the child finds its supervisor gone
            if not self.unfit.is_set():
                self.process.kill()
            return None

    def _retire(self) -> None:
        """Ask for nothing more. It ends once its children have."""
        self.outdated = True
        self._be_unfit()
        with suppress(OSError):
            self._requests.shutdown(socket.SHUT_WR)

    def _be_unfit(self) -> None:
        self.unfit.set()
        if self._asked is not None:
            self._asked.answered.set()


class ForkServers:
    """Keeps a fork server of each kind that can become one of `services`, for the run in `folder`.

    `arguments` (--config, --set) are those of every process of the run.
    """

    def __init__(self, arguments: Sequence[str], services: Collection[str], folder: Path) -> None:
        self._arguments = list(arguments)
        self._kinds = [kind for kind, becomes in PRELOADED.items() if set(becomes) & set(services)]
        self._folder = folder
        self._file = folder / "logs" / "forkserver.log"
        self._servers: dict[str, _ForkServerProcess] = {}
        """The newest of each kind."""
        self._earliest: dict[str, float] = {}
        """When the next of a kind may be started."""

    async def keep_running(self, *, task_status: TaskStatus[bool]) -> None:
        """Start a server whenever one is missing, until cancelled, which ends them all.

        Started once each is; says whether all of them were taken over.
        """
        try:
            left = {kind: server for kind in self._kinds if (server := self._take_over(kind)) is not None}
            async with anyio.create_task_group() as tasks:
                for kind in self._kinds:
                    self._servers[kind] = left.get(kind) or await self._start(kind)
                    tasks.start_soon(self._keep_one, kind, tasks)
                task_status.started(bool(left) and len(left) == len(self._kinds))
        finally:
            for kind in self._kinds:
                with suppress(OSError):  # there is none
                    self._door(kind).unlink()

    async def fork(self, reported: ForkRequest) -> ServiceProcess | None:
        """Return the requested process; None if no server can fork it."""
        services = set(services_in(reported.service))
        fit = [server for kind, server in self._servers.items() if services <= set(BECOMES[kind])]
        return await fit[-1].fork(reported) if fit else None

    async def _keep_one(self, kind: str, tasks: TaskGroup) -> None:
        while True:
            server = self._servers[kind]
            tasks.start_soon(server.listen)
            await server.unfit.wait()
            if not server.outdated:
                log.warning("the fork server for services %s torch ended; see %s",
                            "with" if kind == "torch" else "without", self._file)  # fmt: skip
            self._servers[kind] = await self._start_again(kind)

    async def _start_again(self, kind: str) -> _ForkServerProcess:
        """Start a server as soon as the machine gives what that takes; services are started without one meanwhile."""
        while True:
            try:
                return await self._start(kind)
            except OSError as error:
                log.warning("a fork server cannot be started, and is tried again: %s", error)
            await anyio.sleep(_RETRY_S)

    def _door(self, kind: str) -> Path:
        return self._folder / f"forkserver-{kind}.sock"

    def _command(self, kind: str) -> list[str]:
        return [sys.executable, "-P", "-m", "lachesis", "forkserver", kind, str(self._door(kind)), *self._arguments]

    async def _start(self, kind: str) -> _ForkServerProcess:
        await anyio.sleep_until(self._earliest.get(kind, 0.0))
        self._earliest[kind] = anyio.current_time() + _RETRY_S
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, anyio.CancelScope(shield=True):
            process = await _open_supervised(self._command(kind), self._file, stdin=theirs.fileno())
        return _ForkServerProcess(process, ours)

    def _take_over(self, kind: str) -> _ForkServerProcess | None:
        """Return the fork server that the last supervisor of the run has left, if it is as ours would be."""
        requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        requests.setblocking(False)
        try:
            with address(self._door(kind)) as name:
                requests.connect(name)
            pid = _peer(requests)
            if _was_started_with(pid, self._command(kind)):
                return _ForkServerProcess(_AdoptedProcess(pid), requests)
        except OSError:
            pass  # there is none
        requests.close()  # one that is other ends by itself
        return None


def _peer(connection: socket.socket) -> int:
    """Return the pid of who listens at the other end of a connection. Raises `PermissionError` for another user's."""
    pid, user, _ = array("i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * 4))
    if user != os.getuid():
        raise PermissionError
    return pid


def _was_started_with(pid: int, command: Sequence[str]) -> bool:
    """Return whether a process has the command, the environment, the limits and the folder that a child of this one
    would have.

    Raises `OSError` when there is no such process.
    """
    process = Path("/proc") / str(pid)
    environ = {name + b"=" + value for name, value in os.environb.items()}
    return (
        _strings(process / "cmdline") == list(map(os.fsencode, command))
        and set(_strings(process / "environ")) == environ
        and all((process / name).read_bytes() == Path("/proc/self", name).read_bytes() for name in ("limits", "cgroup"))
        and (process / "cwd").samefile(Path.cwd())
    )


def _strings(file: Path) -> list[bytes]:
    return file.read_bytes().split(b"\0")[:-1]


async def start_service(
    command: Sequence[str],
    file: Path,
    limit_s: float,
    *,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> SpawnedProcess | ServiceProcess:
    """Start a service by its `command`, below a reaper.

    It has `variables` and the open files `pass_fds`, too. Returns the reaper's process where that has ended before it
    started the service, as it does when an import fails.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line, stdin = socket.socketpair()
    started: ServiceProcess | None = None
    with anyio.CancelScope(shield=True):  # what was begun is the caller's, whatever happens
        with theirs, stdin:
            descriptors = [theirs.fileno(), *pass_fds]
            command = [*command, "--reaper", f"{theirs.fileno()}:{limit_s}"]
            above = await _open_supervised(
                command, file, stdin=stdin.fileno(), variables=variables, pass_fds=descriptors
            )
        started = await ServiceProcess.open(ours, line.dup().detach(), above=above)
    if started is None:
        return SpawnedProcess(above, line)
    line.close()
    return started


async def _open_supervised(
    command: Sequence[str],
    file: Path,
    *,
    stdin: int = subprocess.PIPE,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start a process that logs to `file`.

    The end of its standard input shows it that the supervisor is gone.

    It has the environment of `os.environ`, which libraries in C (readline) change behind Python's back, with
    `variables` added, and the open files `pass_fds`.
    """
    with await write_when_room(file, partial(file.open, "ab")) as sink:
        return await anyio.open_process(
            command,
            stdin=stdin,
            stdout=sink,
            stderr=sink,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
            pass_fds=pass_fds,
        )
