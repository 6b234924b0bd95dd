"""Runs untrusted Python programs, each in a sandbox of its own.

`run` returns after all processes of the program are dead.

At the start it tests which protections the machine grants. A missing one raises `StartupError` if it is required, and
is logged once if not. `launcher`, a small process for each program, does the work.
"""

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from lachesis.pipeline.common.disk import is_disk_full
from lachesis.pipeline.errors import InfrastructureError, StartupError
from lachesis.pipeline.scorer.sandbox.cgroups import GroupLimits, find_groups
from lachesis.pipeline.scorer.sandbox.files import InterpreterFiles, interpreter_files
from lachesis.pipeline.scorer.sandbox.root import can_become
from lachesis.pipeline.scorer.sandbox.syscalls import build_filter
from lachesis.schemas.errors import ConfigError

__all__ = ["PROTECTIONS", "Sandbox", "SandboxLimits"]

log = logging.getLogger("lachesis")

PROTECTIONS = {
    "namespaces": "without them programs share the machine's process table, and Landlock alone guards its files",
    "landlock": "without it and namespaces a program can read and write whatever its user can",
    "seccomp": "without it a program can make every system call, and leave processes behind if there are no namespaces",
    "cgroups": "without them memory is summed every 10 ms, so that a program may take more for that long",
}
"""What the kernel can grant -> what it means if it does not. Landlock matters only without namespaces."""

_NOBODY_UID = 65534
_LAUNCHER = Path(__file__).with_name("launcher.py")
_MAX_OUTPUT_BYTES = 1 << 16
_SCRATCH_BYTES = 16 << 20
_OWN_MEMORY_BYTES = 32 << 20  # of the init, in the program's control group
_OWN_PROCESSES = 2
_USED = "\0cpu "
"""As the launcher writes it."""
_LAUNCH_S = 10.0
"""Seconds beyond a program's own after which the launcher ends it, should the scorer not have done so."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Of one program, all of its processes together."""

    wall_s: float
    cpu_s: float
    memory_bytes: int
    processes: int


class Sandbox:
    """Runs programs within `limits`, on a machine that grants at least what is `required`."""

    def __init__(self, limits: SandboxLimits, *, required: Sequence[str], packages: bool) -> None:
        """Try the sandbox. Raises `StartupError` if the machine lacks something that is required."""
        unknown = set(required) - set(PROTECTIONS)
        if unknown:
            raise ConfigError(f"unknown protection {', '.join(sorted(unknown))}; there are {', '.join(PROTECTIONS)}")
        self._limits = limits
        self._files: InterpreterFiles = interpreter_files(packages=packages)
        self._drops_root = can_become(_NOBODY_UID)
        self._granted = set(PROTECTIONS)
        self._filter = b""
        self._groups: list[GroupLimits] = []
        self.missing: dict[str, str] = {}
        """Protection -> why this machine does not grant it."""
        self._choose()
        lacking = [name for name in required if name in self.missing]
        if lacking:
            raise StartupError(
                f"untrusted code cannot be isolated here: {self._reported_error(lacking)}. Mend the machine "
                "(pipeline/scorer/sandbox/README.md says what it must grant), or take the name out of the rater's "
                "`required`."
            )
        if self.missing:
            log.warning(
                "untrusted code runs with less isolation than it could: %s", self._reported_error(list(self.missing))
            )

    async def run(self, program: bytes, text: bytes) -> str | None:
        """Return a Python program's output, as `run_within`, with all the time that programs have."""
        return (await self.run_within(program, text, self._limits.cpu_s))[0]

    async def run_within(self, program: bytes, text: bytes, cpu_s: float) -> tuple[str | None, float]:
        """Return a Python program's output, and the seconds of processor time that it took.

        None if it failed or printed more than 64 KiB. The time is that of all its processes. `text` is its input. It
        may take `cpu_s`, and no more than the limit of all programs.

        When this returns, raises or is cancelled, no process of the program is alive. Raises `InfrastructureError` if
        the sandbox could not be set up this time: that says nothing about the program.
        """
        with self._folder() as folder:
            pipe = subprocess.PIPE
            cpu_s = min(cpu_s, self._limits.cpu_s)
            command = self._command(folder, program, text, cpu_s)
            process = await anyio.open_process(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            output = None
            try:
                output = await _talk(process, self._filter + program + text)
            finally:
                with anyio.CancelScope(shield=True):
                    reason, used_s = await _end(process)
            if reason:
                raise InfrastructureError(f"the sandbox could not be set up: {reason}")
            return output, cpu_s if used_s is None else used_s

    def _choose(self) -> None:
        """Find out what the machine grants: run a program, and give up each protection that fails."""
        limits = self._limits
        found = find_groups(limits.memory_bytes + _SCRATCH_BYTES + _OWN_MEMORY_BYTES, limits.processes + _OWN_PROCESSES)
        if isinstance(found, str):
            self._give_up("cgroups", found)
        else:
            self._groups = found
        for _ in range(len(PROTECTIONS) + 1):
            code = build_filter(os.uname().machine, alone="namespaces" not in self._granted)
            if code is None and "seccomp" in self._granted:
                self._give_up("seccomp", f"no list of system calls for {os.uname().machine}")
            self._filter = code or b"" if "seccomp" in self._granted else b""
            reason = self._attempt()
            if reason is None:
                return
            name, _, words = reason.partition(": ")
            if name not in self._granted:
                break
            self._give_up(name, words)
        raise StartupError(f"untrusted code cannot be run here: {reason}")

    def _give_up(self, name: str, reason: str) -> None:
        self._granted.discard(name)
        self.missing[name] = reason.strip()
        if name == "cgroups":
            self._groups = []

    def _attempt(self) -> str | None:
        """Run a program; return why it failed, None if it did not."""
        program = b"print(6 * int(input()))"
        with self._folder() as folder:
            command = self._command(folder, program, b"7", self._limits.cpu_s)
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            ) as process:
                assert process.stdin and process.stdout and process.stderr  # noqa: S101, PT018 - all are pipes
                with suppress(BrokenPipeError):
                    process.stdin.write(self._filter + program + b"7")
                    process.stdin.flush()
                output, errors = process.stdout.read(), process.stderr.read()
                process.wait()  # before its input closes, which would end it
        return None if output.strip() == b"42" else _reason(errors)[0] or "a test program failed"

    def _command(self, folder: str, program: bytes, text: bytes, cpu_s: float) -> list[str]:
        limits, files = self._limits, self._files
        given = {
            "bytes": f"{len(self._filter)},{len(program)},{len(text)}",
            "wall_s": str(limits.wall_s + _LAUNCH_S),
            "limits": f"{cpu_s},{limits.memory_bytes},{_SCRATCH_BYTES},{limits.processes}",
            "python": files.python,
            "readable": "\n".join(files.readable),
            "links": "\n".join("\t".join(link) for link in files.links),
            "hidden": "\n".join(files.hidden),
            "folder": folder,
            "drops_root": "1" if self._drops_root else "",
            "landlock": "1" if "landlock" in self._granted else "",
            "cgroups": "\n".join(
                "\t".join([path, *(f"{file}={value}" for file, value in values.items())])
                for path, values in self._groups
            ),
        }
        bare = [os.path.realpath(sys.executable), "-I", "-S", str(_LAUNCHER)]
        return [*bare, *(f"{key}={value}" for key, value in given.items())]

    @contextmanager
    def _folder(self) -> Iterator[str]:
        """Give a program a folder on the machine's disk, if it cannot have a root of its own; else an empty string."""
        if "namespaces" in self._granted:
            yield ""
            return
        with _full_disk_raised(), tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder, "tmp")  # as the launcher names it
            scratch.mkdir()
            if self._drops_root:
                for path in (folder, scratch):
                    os.chown(path, _NOBODY_UID, _NOBODY_UID)
            yield folder

    def _reported_error(self, names: list[str]) -> str:
        return "; ".join(f"no {name} ({self.missing[name]}): {PROTECTIONS[name]}" for name in names)


async def _talk(process: anyio.abc.Process, request: bytes) -> str | None:
    """Send the request and return the output of a program that succeeded."""
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    with suppress(anyio.BrokenResourceError):  # the launcher failed and says why
        await process.stdin.send(request)
    output = b""
    async for part in process.stdout:
        output += part
        if len(output) > _MAX_OUTPUT_BYTES:
            return None
    code = await process.wait()
    return output.decode(errors="replace") if code == 0 else None


async def _end(process: anyio.abc.Process) -> tuple[str, float | None]:
    """End the launcher, and with it everything of the program; return as `_reason`.

    A byte requests the end: the launcher's input may stay open if another process has inherited the other end.
    """
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.send(b"\0")
    await process.stdin.aclose()
    errors = b"".join([part async for part in process.stderr])
    code = await process.wait()
    await process.aclose()
    reason, used_s = _reason(errors)
    return reason or (f"its launcher was killed by signal {-code}" if code < 0 else ""), used_s


def _reason(errors: bytes) -> tuple[str, float | None]:
    """Return what a launcher could not set up, if anything, and the seconds of processor time of its program."""
    reason, marked, used_s = errors.decode(errors="replace").partition(_USED)
    return reason.strip(), float(used_s) if marked else None


@contextmanager
def _full_disk_raised() -> Iterator[None]:
    """Raise `InfrastructureError` for a full disk: it says nothing about the code."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise InfrastructureError(f"{error}; make room in {tempfile.gettempdir()}") from error
