"""Rates program code by running it against tests: the share of them that pass.

The code is an answer that nobody trusts. Each test runs in a process of its own, without network, with limited time,
memory and output, on a file system that it can only read (see `sandbox`).
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import anyio.abc

from lachesis.pipeline.disk import is_disk_full
from lachesis.pipeline.scoring.rater import Rater, Sample
from lachesis.schemas.errors import ConfigError, DataError, InfrastructureError, StartupError

__all__ = ["CodeRater"]

_SANDBOX = Path(__file__).with_name("sandbox.py")
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_OUTPUT = 1 << 16
_LONGEST_CODE = 1 << 16
_SCRATCH_BYTES = 16 << 20


class CodeRater(Rater):
    """Tests come from the task: `tests`, a list of {input, output} for a program that reads standard input, or of
    {assert}, lines of Python that are run after the code. Assertions run in the interpreter that ran the code, so code
    that sets out to deceive them can; standard input and output leave it no way.

    `time_s` (of processor) and `memory_mb` hold for each test, `total_s` for all of a sample: what goes beyond has
    failed, since that is the answer's own doing.
    """

    name = "code"
    bounds = (0.0, 1.0)

    def __init__(self, *, time_s: int = 2, total_s: int = 8, memory_mb: int = 512, processes: int = 16) -> None:
        if min(time_s, total_s, memory_mb, processes) < 1:
            raise ConfigError("rater code: time_s, total_s, memory_mb and processes must be at least 1.")
        self.needs_s = total_s + 1.0
        self._total_s = total_s
        self._limits = [str(_SCRATCH_BYTES), str(time_s), str(memory_mb << 20), str(processes)]
        self._check()

    def _check(self) -> None:
        """Raise `StartupError` where the sandbox cannot be had."""
        read, write = os.pipe()
        with tempfile.TemporaryDirectory() as scratch, os.fdopen(read, "rb") as report:
            command = [*self._command(scratch, write), "-c", "print(6 * 7)"]
            done = subprocess.run(command, capture_output=True, pass_fds=[write], timeout=60, check=False)
            os.close(write)
            reason = (report.read() or done.stderr).decode(errors="replace")
        if done.stdout.strip() != b"42":
            raise StartupError(
                f"rater code: untrusted code cannot be isolated here ({reason}); "
                "it needs Linux 5.12 or newer on x86_64 or aarch64 with unprivileged user namespaces"
            )

    async def rate(self, sample: Sample) -> float | None:
        """Return the share of tests that pass; abstains if the task has none. Without code, 0.

        Raises `InfrastructureError` where the sandbox could not be set up this time.
        """
        tests = sample.task.get("tests")
        if not tests:
            return None
        checked = [_checked(test, sample.item) for test in tests]
        blocks = _BLOCK.findall(sample.completion)
        passed = 0
        with anyio.move_on_after(self._total_s):
            for test in checked if blocks else ():
                passed += await self._passes(blocks[-1], test)
        return passed / len(tests)

    async def _passes(self, code: str, test: Mapping[str, str]) -> bool:
        # the seal is printed after the assertions: a program that exits early has not passed them
        seal = os.urandom(16).hex()
        program = f"{code}\n\n{test['assert']}\nprint({seal!r})\n" if "assert" in test else code
        try:
            data = program.encode()
        except UnicodeEncodeError:  # half a character is no program
            return False
        output = await self._run(data, test.get("input", "")) if len(data) <= _LONGEST_CODE else None
        if output is None:
            return False
        if "assert" in test:
            return output.rstrip().endswith(seal)
        return output.split() == test["output"].split()

    async def _run(self, program: bytes, text: str) -> str | None:
        """Return what the program printed, None if it failed or printed too much."""
        read, write = os.pipe()
        with _full_disk_raised(), tempfile.TemporaryDirectory() as folder, os.fdopen(read, "rb") as report:
            file, scratch = _prepared(Path(folder), program)
            try:
                process = await anyio.open_process(
                    [*self._command(str(scratch), write), str(file)],
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[write],
                )
            finally:
                os.close(write)
            try:
                output = await _talk(process, text)
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
                    await process.aclose()
            reason = report.read().decode(errors="replace")
        if reason:
            raise InfrastructureError(f"rater code: the sandbox could not be set up: {reason}")
        return output

    def _command(self, scratch: str, report: int) -> list[str]:
        bare = [sys.executable, "-I", "-S", str(_SANDBOX)]
        return [*bare, str(report), scratch, *self._limits, sys.executable, "-I"]


@contextmanager
def _full_disk_raised() -> Iterator[None]:
    """Raise `InfrastructureError` for a full disk: it says nothing about the code."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise InfrastructureError(f"rater code: {error}; make room in {tempfile.gettempdir()}") from error


def _prepared(folder: Path, program: bytes) -> tuple[Path, Path]:
    file, scratch = folder / "program.py", folder / "scratch"
    file.write_bytes(program)
    scratch.mkdir()
    return file, scratch


async def _talk(process: anyio.abc.Process, text: str) -> str | None:
    assert process.stdin is not None  # noqa: S101 - both are pipes
    assert process.stdout is not None  # noqa: S101
    stdin, stdout = process.stdin, process.stdout

    async def feed() -> None:
        with suppress(anyio.BrokenResourceError, BrokenPipeError):  # it may end without reading all of it
            await stdin.send(text.encode())
        await stdin.aclose()

    output = b""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        async for part in stdout:
            output += part
            if len(output) > _MOST_OUTPUT:
                tasks.cancel_scope.cancel()
                return None
    code = await process.wait()
    return output.decode(errors="replace") if code == 0 else None


def _checked(test: object, item: str) -> Mapping[str, str]:
    texts = isinstance(test, Mapping) and all(isinstance(value, str) for value in test.values())
    if isinstance(test, Mapping) and texts and ("assert" in test or "output" in test):
        return test
    raise DataError(
        f"item {item}: a test of code has `output` (and `input`), or `assert`, as text; this one is {test!r:.200}"
    )
