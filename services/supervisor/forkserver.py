"""Runs a fork server: a process that has imported the services' modules and starts each by a fork.

A service that dies is unavailable while its next process imports packages: most of its recovery, and seconds if torch
is among them. A fork server imports them once, for all later starts. There is one with torch, and one, far smaller,
without. Environments import torch with a tokenizer, so they are forked from the first where there is one. Its standard
input is a socket on which the supervisor (`forking`) requests each service by one message, with the end of a pipe that
becomes the service's standard input: as for every supervised process, the end of that pipe shows that the supervisor is
gone. A server whose files have changed since it imported them, by an upgrade say, forks nothing more, and another takes
its place.

Between the server and each service is a reaper (`services/process/reaper.py`), which reports to the supervisor itself.
A server that is no longer wanted goes on until its children have ended. If its supervisor was killed, it waits for the
next one to connect to its other socket, the door, since importing is most of that recovery as well. If none comes, it
ends.
"""

import atexit
import gc
import importlib
import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import msgspec
from setproctitle import setproctitle

from lachesis.pipeline.common.disk import write_when_room_sync
from lachesis.pipeline.common.late_output import keep_output
from lachesis.pipeline.common.tls import tls_context
from lachesis.pipeline.common.uncollected_imports import uncollected_imports
from lachesis.schemas.errors import LachesisError
from lachesis.services.process.reaper import end_descendants, start_below_reaper, take_orphans
from lachesis.services.registry import CORE, load_stage

__all__ = [
    "BECOMES",
    "MAX_REQUEST_BYTES",
    "PRELOADED",
    "USED_LATER",
    "ForkRequest",
    "ForkServerOutdated",
    "ForkServerReady",
    "ForkStarted",
    "Message",
    "address",
    "end_at_once",
    "serve_forks",
]

PRELOADED = {
    "plain": tuple(spec.name for spec in CORE.values() if spec.extra is None),
    "torch": tuple(spec.name for spec in CORE.values() if spec.extra == "train"),
}
"""The kinds of fork servers, each with the services that its children can be.

Those of extensions are not among them: what they import may fail, or not go with a fork.
"""
BECOMES = PRELOADED | {"torch": (*PRELOADED["torch"], "environment")}
"""The same, with those that its children can also be. An environment imports torch with the tokenizer of its policy,
some 200 MB of its own, unless it is forked from a server that has it."""
USED_LATER = {
    "plain": ("httpcore", "numpy.ma"),
    "torch": ("httpcore", "numpy.ma", "lachesis.pipeline.inference.engines.reference.serve"),
}
"""Modules that are otherwise imported when a service first uses them, by each one for itself."""
MAX_REQUEST_BYTES = 1 << 16
"""Bytes of a message at most."""
_EXIT_INTERRUPTED = 130
_ORPHANED_S = 10.0
"""How long a server whose supervisor was killed waits for the next one."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to fork: what the process runs, and the file that its output goes to.

    `limit_s`: seconds for which it may outlive its supervisor.
    """

    service: str
    part: str
    replica: int
    log: str
    limit_s: float


class ForkServerReady(msgspec.Struct, frozen=True, tag=True):
    """All is imported."""


class ForkStarted(msgspec.Struct, frozen=True, tag=True):
    """The answer to a request; the other end of the channel of the service's reaper comes with it."""


class ForkServerOutdated(msgspec.Struct, frozen=True, tag=True):
    """The answer of a server whose files have changed."""


Message = ForkServerReady | ForkStarted | ForkServerOutdated


def serve_forks(kind: str, door: Path, read_config: Callable[[], object]) -> ForkRequest | None:
    """Import what the services of that kind import, then fork on demand.

    `read_config` is called once before: reading a configuration takes a third of the time once its types and the
    extensions are known. Each service reads it again, since it may have changed.

    Returns in every process that is forked, with its request; None: it is the fork server, no longer needed.
    """
    keep_output()
    requests = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    take_orphans()
    server = _ForkServer(requests, _listen(door))
    for name in BECOMES[kind]:
        load_stage(CORE[name])
    with uncollected_imports():
        for module in USED_LATER[kind]:
            with suppress(ModuleNotFoundError):  # the service that needs it says so
                importlib.import_module(module)
        anyio.run(anyio.lowlevel.checkpoint)  # anyio imports its event loop when the first one runs
        tls_context(trust_env=False)
        with suppress(LachesisError, OSError):  # the services say what is wrong with it
            read_config()
    return server.serve()


@contextmanager
def end_at_once() -> Iterator[None]:
    """End a process that was forked as soon as the body exits.

    Were the interpreter to take everything apart first, all memory that is shared with the fork server would be written
    to, and copied.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as end:
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = end.code if isinstance(end, SystemExit) else _EXIT_INTERRUPTED
        os._exit(code if isinstance(code, int) else 1)


@contextmanager
def address(file: Path) -> Iterator[str]:
    """Yield a name of the socket `file` that is short enough for one, however deep its folder is."""
    folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{file.name}"
    finally:
        os.close(folder)


def _listen(door: Path) -> socket.socket | None:
    """Return the door, or None where there can be none: not every file system has sockets."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.fchmod(listening.fileno(), 0o600)
    try:
        door.unlink(missing_ok=True)
        with address(door) as name:
            listening.bind(name)
    except OSError as error:
        print(f"{error}: the next supervisor cannot take over from one that is killed", file=sys.stderr, flush=True)
        listening.close()
        return None
    listening.listen()
    return listening


class _ForkServer:
    """Serves one supervisor after the other."""

    def __init__(self, requests: socket.socket, door: socket.socket | None) -> None:
        self._requests = requests
        self._door = door
        self._children: dict[int, int] = {}
        """The pid of each, by its pidfd."""
        self._imported: dict[bytes, tuple[int, int] | None] = {}
        self._outdated = False
        self._leaves_at = math.inf
        self._poll = select.poll()

    def serve(self) -> ForkRequest | None:
        """Fork until it is no longer needed. For what it returns see `serve_forks`."""
        files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        # copies of the names, which lie together: to look at one is to write to its page, and the pages of the modules'
        # own names are shared with the children
        self._imported = _state_of(map(os.fsencode, filter(None, files)))
        gc.freeze()  # what is shared with the children stays shared
        self._welcome()
        while self._children or time.monotonic() < self._leaves_at:
            for descriptor, _ in self._poll.poll(self._patience_ms()):
                if descriptor in self._children:
                    self._take_end(descriptor)
                elif self._door is not None and descriptor == self._door.fileno():
                    self._poll.unregister(self._door)
                    self._requests, _ = self._door.accept()
                    self._welcome()
                elif (reported := self._answer()) is not None:
                    return reported
        return None

    def _patience_ms(self) -> float | None:
        left_s = self._leaves_at - time.monotonic()
        return 1e3 * left_s if 0 < left_s < math.inf else None

    def _welcome(self) -> None:
        self._leaves_at = math.inf
        self._poll.register(self._requests, select.POLLIN)
        self._send(ForkServerReady())

    def _answer(self) -> ForkRequest | None:
        """Take in a request, or that there will be none. Returns in a process that was forked."""
        try:
            data, passed, _, _ = socket.recv_fds(self._requests, MAX_REQUEST_BYTES, 1)
        except ConnectionResetError:  # it was killed with something unread
            data, passed = b"", []
        if not data:
            self._be_alone()
            return None
        self._outdated |= _state_of(self._imported) != self._imported
        if self._outdated:
            os.close(passed[0])
            self._send(ForkServerOutdated())
            return None
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            channel.close()
            self._requests.close()
            if self._door is not None:
                self._door.close()
            for other in self._children:
                os.close(other)
            return _become(msgspec.json.decode(data, type=ForkRequest), passed[0], theirs)
        theirs.close()
        os.close(passed[0])
        child = os.pidfd_open(pid)
        self._children[child] = pid
        self._poll.register(child, select.POLLIN)
        self._send(ForkStarted(), channel.fileno())
        channel.close()
        return None

    def _be_alone(self) -> None:
        """Wait for another supervisor, or only for the children where it is of no use to one."""
        self._poll.unregister(self._requests)
        if self._outdated or self._door is None:  # and this supervisor may still be there for their exit codes
            self._leaves_at = 0.0
            return
        self._requests.close()
        self._leaves_at = time.monotonic() + _ORPHANED_S
        self._poll.register(self._door, select.POLLIN)

    def _take_end(self, child: int) -> None:
        """Reap a reaper, and where it was killed, what it watched: the kernel has given that to this process."""
        self._poll.unregister(child)
        os.waitpid(self._children.pop(child), 0)
        os.close(child)
        end_descendants(spared=self._children.values())

    def _send(self, message: Message, *descriptors: int) -> None:
        with suppress(OSError):  # the other end is gone
            socket.send_fds(self._requests, [msgspec.json.encode(message)], descriptors)


def _state_of(files: Iterable[bytes]) -> dict[bytes, tuple[int, int] | None]:
    """Return by file what changes when its content does; None: it is not there."""
    found: dict[bytes, tuple[int, int] | None] = {}
    for file in files:
        try:
            state = os.stat(file)  # noqa: PTH116 - of thousands of files
            found[file] = state.st_mtime_ns, state.st_size
        except OSError:
            found[file] = None
    return found


def _become(reported: ForkRequest, stdin: int, channel: socket.socket) -> ForkRequest:
    """Take the place of a newly started process: a session, input and output of its own, and its name.

    Returns below a reaper.
    """
    os.setsid()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    sink = write_when_room_sync(Path(reported.log), partial(os.open, reported.log, flags, 0o666))
    for given, standard in ((stdin, 0), (sink, 1), (sink, 2)):
        os.dup2(given, standard)
    os.close(stdin)
    os.close(sink)
    name = " ".join(filter(None, (reported.service, reported.part)))
    start_below_reaper(channel, reported.limit_s, f"lachesis reaper of {name}")
    os.setsid()
    setproctitle(" ".join(("lachesis run", name, *sys.argv[4:])))
    _draw_anew()
    return reported


def _draw_anew() -> None:
    """Seed what draws random numbers again, as in a newly started process; `random` does so by itself."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
