"""Fork servers: processes that have imported what services import, and become one by a fork, in milliseconds.

A service that dies is away for as long as its next life imports packages: most of its recovery, and seconds where torch
is among them. A fork server has that behind it, once and for all the lives to come. There is one with torch, and one,
far smaller, without. The supervisor asks by one message on the socket that is the server's standard input, with the end
of a pipe that becomes the standard input of the service: as for every supervised process, its end says that the
supervisor is gone. A server whose files have changed since it imported them, by an upgrade say, forks nothing more, and
another takes its place. Nothing depends on one: without its answer a service starts as it would without.

The service is the fork server's child, so it is the server that learns how it ended, and tells. A server that is no
longer wanted goes on until its children have ended.
"""

import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from anyio.abc import Process, TaskGroup, TaskStatus
from setproctitle import setproctitle

from lachesis.services.registry import SERVICES, load_main

__all__ = ["PRELOADED", "ForkServers", "Forked", "Told", "open_supervised", "serve_forks"]

log = logging.getLogger("lachesis")

PRELOADED = {
    "plain": tuple(spec.name for spec in SERVICES.values() if spec.extra is None),
    "torch": tuple(spec.name for spec in SERVICES.values() if spec.extra == "train"),
}
"""The kinds of fork servers, each with the services that its children can be."""
_AGAIN_S = 5.0
_ANSWER_S = 5.0
"""What a fork server may take to fork, or to say how a child of its ended, before it is taken for stuck."""
_IMPORT_S = 60.0
"""What it may take to import all, likewise."""
_LONGEST = 1 << 16


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork is to be, and the file that its output goes to."""

    service: str
    part: str
    replica: int
    log: str


class _Ready(msgspec.Struct, frozen=True, tag=True):
    """All is imported."""


class _Began(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request; a pidfd of the process comes with it."""

    pid: int


class _Outdated(msgspec.Struct, frozen=True, tag=True):
    """The answer of a server whose files have changed."""


class _Ended(msgspec.Struct, frozen=True, tag=True):
    """`code` is as `subprocess` has it: -n where signal n ended the process."""

    pid: int
    code: int


_Message = _Ready | _Began | _Outdated | _Ended


# -- the fork server


def serve_forks(kind: str) -> Told | None:
    """Import what the services of that kind import, then fork on demand.

    Returns in every process that is forked, with what it is told to be; None: it is the fork server, no longer needed.
    """
    for name in PRELOADED[kind]:
        load_main(SERVICES[name])
    imported = _state_of(getattr(module, "__file__", None) for module in list(sys.modules.values()))
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    requests = socket.socket(fileno=sys.stdin.fileno())
    _tell(requests, _Ready())
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    children: dict[int, int] = {}
    wanted = True
    while wanted or children:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                pid = children.pop(descriptor)
                _, status = os.waitpid(pid, 0)
                os.close(descriptor)
                _tell(requests, _Ended(pid, os.waitstatus_to_exitcode(status)))
                continue
            data, passed, _, _ = socket.recv_fds(requests, _LONGEST, 1)
            if not data:
                poll.unregister(requests)
                wanted = False
                continue
            if _state_of(imported) != imported:
                os.close(passed[0])
                _tell(requests, _Outdated())
                continue
            pid = os.fork()
            if pid == 0:
                requests.detach()
                for other in children:
                    os.close(other)
                return _become(msgspec.json.decode(data, type=Told), passed[0])
            os.close(passed[0])
            child = os.pidfd_open(pid)
            children[child] = pid
            poll.register(child, select.POLLIN)
            _tell(requests, _Began(pid), child)
    return None


def _state_of(files: Iterable[str | None]) -> dict[str, tuple[int, int] | None]:
    """Return by file what changes when its content does; None: it is not there."""
    found: dict[str, tuple[int, int] | None] = {}
    for file in filter(None, files):
        try:
            state = os.stat(file)  # noqa: PTH116 - of thousands of files
            found[file] = state.st_mtime_ns, state.st_size
        except OSError:
            found[file] = None
    return found


def _tell(requests: socket.socket, message: _Message, *descriptors: int) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # the supervisor is gone
        socket.send_fds(requests, [msgspec.json.encode(message)], descriptors)


def _become(told: Told, stdin: int) -> Told:
    """Take the place of a process that was started anew: a session, input and output of its own, and its name."""
    os.setsid()
    sink = os.open(told.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for given, standard in ((stdin, 0), (sink, 1), (sink, 2)):
        os.dup2(given, standard)
    os.close(stdin)
    os.close(sink)
    setproctitle(" ".join(filter(None, ("lachesis run", told.service, told.part, *sys.argv[3:]))))
    return told


# -- the supervisor's side


class Forked:
    """A process that a fork server has forked: what a supervisor needs of anyio's `Process`."""

    def __init__(self, pid: int, pidfd: int, stdin: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._stdin = stdin
        self._code: int | None = None
        self._told = anyio.Event()

    def tell(self, code: int | None) -> None:
        """Take in how it ended; None: nobody will say."""
        self._code = code
        self._told.set()

    async def wait(self) -> int:
        """Wait for its end and return its exit code; it counts as killed where nobody says how it ended."""
        if self.returncode is None:
            await anyio.wait_readable(self._pidfd)
            with anyio.move_on_after(_ANSWER_S):
                await self._told.wait()
            self.returncode = -signal.SIGKILL if self._code is None else self._code
            os.close(self._pidfd)
            os.close(self._stdin)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            signal.pidfd_send_signal(self._pidfd, number)


class _Server:
    """One fork server, from its start to its end."""

    def __init__(self, kind: str, process: Process, requests: socket.socket) -> None:
        self.kind = kind
        self.process = process
        self.unfit = anyio.Event()
        """Set once it is to be asked no more."""
        self.outdated = False
        self._ready = anyio.Event()
        self._requests = requests
        self._asking = anyio.Lock()
        self._answered = anyio.Event()
        self._asked: int | None = None
        """The end of the pipe that goes with the request under way."""
        self._children: dict[int, Forked] = {}
        self._newest: Forked | None = None

    async def listen(self) -> None:
        """Take in what it says until it ends; then nobody will say how its children end."""
        try:
            while message := await self._receive():
                data, passed = message
                match msgspec.json.decode(data, type=_Message):
                    case _Ready():
                        self._ready.set()
                    case _Outdated():
                        self._retire()
                    case _Began(pid) if self._asked is not None:
                        self._newest = self._children[pid] = Forked(pid, passed[0], self._asked)
                        self._answered.set()
                    case _Ended(pid, code):
                        if (child := self._children.pop(pid, None)) is not None:
                            child.tell(code)
        finally:
            self.unfit.set()
            self._ready.set()
            self._answered.set()
            for child in self._children.values():
                child.tell(None)
            self._requests.close()
            with anyio.CancelScope(shield=True):
                if self.process.returncode is None:
                    self.process.kill()
                await self.process.aclose()

    async def _receive(self) -> tuple[bytes, list[int]] | None:
        await anyio.wait_readable(self._requests)
        try:
            data, passed, _, _ = socket.recv_fds(self._requests, _LONGEST, 1)
        except ConnectionResetError:
            return None
        return (data, passed) if data else None

    async def fork(self, told: Told) -> Forked | None:
        """Return a process that is what it is told, once all is imported. None: the server cannot, or does not answer
        and is ended."""
        async with self._asking:
            with anyio.move_on_after(_IMPORT_S):
                await self._ready.wait()
            if self.unfit.is_set():
                return None
            theirs, ours = os.pipe()
            self._answered, self._asked, self._newest = anyio.Event(), ours, None
            with anyio.CancelScope(shield=True):  # what was begun is the caller's, whatever happens
                try:
                    socket.send_fds(self._requests, [msgspec.json.encode(told)], [theirs])
                    with anyio.move_on_after(_ANSWER_S):
                        await self._answered.wait()
                except OSError:
                    pass  # it has just died
                finally:
                    os.close(theirs)
            self._asked = None
            if self._newest is None:
                os.close(ours)  # should it fork after all, the child finds its supervisor gone
                if self.process.returncode is None and not self.outdated:
                    self.process.kill()
            return self._newest

    def _retire(self) -> None:
        """Ask for nothing more. It ends once its children have."""
        self.outdated = True
        self.unfit.set()
        self._answered.set()
        with suppress(OSError):
            self._requests.shutdown(socket.SHUT_WR)


class ForkServers:
    """Keeps a fork server of each kind that can become one of `services`.

    `arguments` (--config, --set) are those of every process of the run.
    """

    def __init__(self, arguments: Sequence[str], services: Collection[str], logs: Path) -> None:
        self._arguments = list(arguments)
        self._kinds = [kind for kind, becomes in PRELOADED.items() if set(becomes) & set(services)]
        self._file = logs / "forkserver.log"
        self._servers: list[_Server] = []

    async def keep(self, *, task_status: TaskStatus[None]) -> None:
        """Start a server whenever one is missing, until cancelled, which ends them all. Started once each is."""
        async with anyio.create_task_group() as tasks:
            for kind in self._kinds:
                tasks.start_soon(self._keep_one, await self._start(kind), tasks)
            task_status.started()

    async def fork(self, told: Told) -> Forked | None:
        """Return a process that is what it is told; None where no server can be it."""
        for server in self._servers:
            if told.service in PRELOADED[server.kind]:
                return await server.fork(told)
        return None

    async def _keep_one(self, server: _Server, tasks: TaskGroup) -> None:
        while True:
            tasks.start_soon(server.listen)
            await server.unfit.wait()
            self._servers.remove(server)
            if not server.outdated:
                log.warning("the fork server for services %s torch ended; see %s",
                            "with" if server.kind == "torch" else "without", self._file)  # fmt: skip
                await anyio.sleep(_AGAIN_S)
            server = await self._start(server.kind)

    async def _start(self, kind: str) -> _Server:
        command = [sys.executable, "-m", "lachesis", "forkserver", kind, *self._arguments]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, anyio.CancelScope(shield=True):
            process = await open_supervised(command, self._file, stdin=theirs.fileno())
        server = _Server(kind, process, ours)
        self._servers.append(server)
        return server


async def open_supervised(command: Sequence[str], file: Path, *, stdin: int = subprocess.PIPE) -> Process:
    """Start a process that logs to `file`. The end of its standard input tells it that the supervisor is gone."""
    with file.open("ab") as sink:
        return await anyio.open_process(command, stdin=stdin, stdout=sink, stderr=sink, start_new_session=True)
