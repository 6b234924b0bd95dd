"""Runs an agent's program as one sample: in a folder and a process group of its own, within bounds.

Guarantees that whatever the program does, it has ended when `run_program` returns, with all that it has started, and
soon after this process is killed (`program_launcher`); that its output takes bounded memory; and that what it did wrong
has a name.
"""

import errno
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from lachesis.pipeline.common.safe_text import printable_lines
from lachesis.pipeline.common.secret_names import is_secret_name
from lachesis.pipeline.errors import EnvironmentCodeError
from lachesis.schemas.errors import ConfigError, LachesisError

__all__ = ["ProgramEnd", "delete_left_folders", "program_environment", "run_program"]

SESSION_URL = "LACHESIS_SESSION_URL"
_LAUNCHER = str(Path(__file__).with_name("program_launcher.py"))
TASK_FILE = "LACHESIS_TASK"
_LAST_WORDS_S = 1.0
"""Seconds for which the output of a program that has ended is still read."""
_END_S = 10.0
"""Seconds in which all that a program has started must have ended; then its launcher is killed."""
_KEPT_BYTES = 1600
"""Of the end of a program's output; an error with it is cut at 2,000 characters, and its last words matter most."""
_FOLDER = "lachesis-agent-"
"""How the names of working folders begin."""
_IN_THE_MAKING_S = 60.0
"""A folder that is newer may not be locked yet."""
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors of a start that say nothing of the command: processes, memory or open files are used up."""
_BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


class _LauncherReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher says at its end: see `program_launcher`."""

    status: int | None = None
    left: int = 0
    errno: int | None = None


class ProgramEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a program ended. `why`: exited by itself; stopped once its session had ended; overdue; flooded: it wrote more
    than it may. `status`: its exit status, below 0 the signal. `left`: processes that it had left running elsewhere.
    """

    why: Literal["exited", "stopped", "overdue", "flooded"]
    status: int
    output: str
    """The end of what it wrote to standard output and standard error."""
    left: int = 0

    @property
    def has_failed(self) -> bool:
        """Whether the program itself went wrong: it wrote too much, or exited with a status other than 0."""
        return self.why == "flooded" or (self.why == "exited" and self.status != 0)

    def describe(self) -> str:
        """Return how it ended, in words."""
        words = {
            "exited": f"exited with status {self.status}"
            if self.status >= 0
            else f"was killed by signal {-self.status}",
            "stopped": "was stopped, since its session had ended",
            "overdue": "had not ended within its time (time_limit_s), and was killed",
            "flooded": "wrote more output than it may (output_bytes), and was killed",
        }[self.why]
        left = f"; it had left {self.left} processes running, which were killed" if self.left else ""
        said = f"; it wrote at last:\n{self.output}" if self.output else "; it wrote nothing"
        return f"{words}{left}{said}"


def program_environment(base: Mapping[str, str], session_url: str, key: str, more: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program: those of this process without secrets, and its session's."""
    kept = {
        name: value for name, value in base.items() if not is_secret_name(name) and not name.startswith("LACHESIS_")
    }
    direct = ",".join(filter(None, [base.get("NO_PROXY") or base.get("no_proxy"), "127.0.0.1,localhost"]))
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": direct,
        "no_proxy": direct,
        "OPENAI_BASE_URL": f"{session_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": session_url,
        "ANTHROPIC_API_KEY": key,
        SESSION_URL: session_url,
        **more,
    }


async def run_program(
    command: Sequence[str],
    environ: Mapping[str, str],
    task: bytes,
    *,
    time_limit_s: float,
    output_bytes: int,
    ended: Callable[[], Awaitable[None]],
) -> ProgramEnd:
    """Run a command until it exits, `ended` returns, or it breaks a bound; return how it ended.

    Its working folder is new and empty but for task.json, which holds `task`, and is deleted afterwards. Raises
    `ConfigError` if there is no such command, and `EnvironmentCodeError` if the system starts none now.
    """
    folder, lock = await anyio.to_thread.run_sync(_new_folder, task)
    try:
        with folder:
            given = {**environ, TASK_FILE: str(Path(folder.name, "task.json")), "PWD": folder.name}
            return await _run(command, given, time_limit_s, output_bytes, ended)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(folder.cleanup)
            os.close(lock)


def delete_left_folders() -> None:
    """Delete folders of programs whose process was killed before it could: they hold tasks, and answers."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _IN_THE_MAKING_S:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _new_folder(task: bytes) -> tuple[tempfile.TemporaryDirectory[str], int]:
    """Return a new folder, and the descriptor whose lock says that it is in use."""
    folder = tempfile.TemporaryDirectory(prefix=_FOLDER, ignore_cleanup_errors=True)
    lock = os.open(folder.name, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    Path(folder.name, "task.json").write_bytes(task)
    return folder, lock


async def _run(
    command: Sequence[str],
    environ: Mapping[str, str],
    time_limit_s: float,
    output_bytes: int,
    ended: Callable[[], Awaitable[None]],
) -> ProgramEnd:
    wanted, control = socket.socketpair()
    with wanted:
        with control:
            try:
                process = await anyio.open_process(
                    [sys.executable, "-I", "-S", _LAUNCHER, *command],
                    env=environ,
                    cwd=environ["PWD"],
                    stdin=control.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise _start_error(command, error.errno) from error
        output = _Output(output_bytes)
        try:
            why = await _watched(process, output, time_limit_s, ended)
        finally:
            with anyio.CancelScope(shield=True):
                wanted.shutdown(socket.SHUT_WR)  # the launcher ends the program, if it has not ended
                with anyio.move_on_after(_END_S):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                status = await process.wait()
                await process.aclose()
        report = _report(wanted)
    if report.errno is not None:
        raise _start_error(command, report.errno)
    return ProgramEnd(
        why=why, status=status if report.status is None else report.status, output=output.text, left=report.left
    )


def _start_error(command: Sequence[str], number: int | None) -> LachesisError:
    kind = EnvironmentCodeError if number in _SHORTAGES else ConfigError
    return kind(f"command: {command[0]!r} cannot be started: {os.strerror(number or 0)}")


def _report(wanted: socket.socket) -> _LauncherReport:
    """Return what a launcher that has ended has said; nothing if something has killed it."""
    with suppress(BlockingIOError, ConnectionError, msgspec.DecodeError):
        wanted.setblocking(False)
        return msgspec.json.decode(wanted.recv(4096), type=_LauncherReport)
    return _LauncherReport()


async def _watched(
    process: anyio.abc.Process, output: "_Output", time_limit_s: float, ended: Callable[[], Awaitable[None]]
) -> Literal["exited", "stopped", "overdue", "flooded"]:
    reasons: list[Literal["exited", "stopped", "overdue", "flooded"]] = []

    async def read() -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        with suppress(*_BROKEN):
            while output.append(await process.stdout.receive()):
                pass
            reasons.append("flooded")
            tasks.cancel_scope.cancel()

    async def wait_for_exit() -> None:
        await process.wait()
        reasons.append("exited")
        with anyio.move_on_after(_LAST_WORDS_S):
            await reading_done.wait()
        tasks.cancel_scope.cancel()

    async def wait_for_end() -> None:
        await ended()
        with anyio.move_on_after(_LAST_WORDS_S):
            await process.wait()  # most programs end by themselves then
            return
        reasons.append("stopped")
        tasks.cancel_scope.cancel()

    reading_done = anyio.Event()

    async def read_all() -> None:
        await read()
        reading_done.set()

    with anyio.move_on_after(time_limit_s):
        async with anyio.create_task_group() as tasks:
            for one in (read_all, wait_for_exit, wait_for_end):
                tasks.start_soon(one)
    return reasons[0] if reasons else "overdue"


class _Output:
    """The end of a program's output, and how much there was in all."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._seen_bytes = 0
        self._kept = b""

    def append(self, data: bytes) -> bool:
        """Take more output; return False if it is more than there may be."""
        self._seen_bytes += len(data)
        self._kept = (self._kept + data)[-_KEPT_BYTES:]
        return self._seen_bytes <= self._limit_bytes

    @property
    def text(self) -> str:
        return printable_lines(self._kept.decode(errors="replace")).strip()
