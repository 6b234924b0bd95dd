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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc

from lachesis.pipeline.scoring.rater import Rater, Sample
from lachesis.schemas.errors import ConfigError, DataError, StartupError

__all__ = ["CodeRater"]

_SANDBOX = Path(__file__).with_name("sandbox.py")
_REFUSED = 97
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_MOST_OUTPUT = 1 << 16
_LONGEST_CODE = 1 << 16
_SCRATCH_BYTES = 16 << 20


class CodeRater(Rater):
    """Tests come from the task: `tests`, a list of {input, output} for a program that reads standard input, or of
    {assert}, lines of Python that are run after the code. Assertions run in the interpreter that ran the code, so code
    that sets out to deceive them can; standard input and output leave it no way.

    `time_s` and `memory_mb` hold for each test; a test beyond them has failed, since that is the answer's own doing.
    """

    name = "code"
    bounds = (0.0, 1.0)

    def __init__(self, *, time_s: int = 5, memory_mb: int = 512, processes: int = 16) -> None:
        if min(time_s, memory_mb, processes) < 1:
            raise ConfigError("rater code: time_s, memory_mb and processes must be at least 1.")
        self._time_s = time_s
        self._limits = [str(time_s), str(memory_mb << 20), str(processes)]
        self._check()

    def _check(self) -> None:
        """Raise `StartupError` where the sandbox cannot be had."""
        with tempfile.TemporaryDirectory() as scratch:
            done = subprocess.run(
                [*self._command(scratch), "-c", "print(6 * 7)"], capture_output=True, timeout=60, check=False
            )
        if done.returncode != 0 or done.stdout.strip() != b"42":
            raise StartupError(
                f"rater code: untrusted code cannot be isolated here ({done.stderr.decode(errors='replace').strip()}); "
                "it needs Linux 5.12 or newer with unprivileged user namespaces"
            )

    async def rate(self, sample: Sample) -> float | None:
        """Return the share of tests that pass; abstains if the task has none. Without code, 0."""
        tests = sample.task.get("tests")
        if not tests:
            return None
        blocks = _BLOCK.findall(sample.completion)
        if not blocks or len(blocks[-1]) > _LONGEST_CODE:
            return 0.0
        passed = [await self._passes(blocks[-1], _checked(test, sample.item)) for test in tests]
        return sum(passed) / len(passed)

    async def _passes(self, code: str, test: Mapping[str, str]) -> bool:
        # the seal is printed after the assertions: a program that exits early has not passed them
        seal = os.urandom(16).hex()
        program = f"{code}\n\n{test['assert']}\nprint({seal!r})\n" if "assert" in test else code
        output = await self._run(program, test.get("input", ""))
        if output is None:
            return False
        if "assert" in test:
            return output.rstrip().endswith(seal)
        return output.split() == test["output"].split()

    async def _run(self, program: str, text: str) -> str | None:
        """Return what the program printed, None if it failed, took too long or printed too much."""
        with tempfile.TemporaryDirectory() as scratch:
            process = await anyio.open_process(
                [*self._command(scratch), "-c", program],
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                with anyio.move_on_after(self._time_s + 1):  # time that is slept away is no processor time
                    return await _talk(process, text)
                return None
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
                    await process.aclose()

    def _command(self, scratch: str) -> list[str]:
        return [
            sys.executable,
            "-I",
            "-S",
            str(_SANDBOX),
            scratch,
            str(_SCRATCH_BYTES),
            *self._limits,
            sys.executable,
            "-I",
        ]


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
    if code == _REFUSED:
        raise OSError("the sandbox could not be set up")
    return output.decode(errors="replace") if code == 0 else None


def _checked(test: object, item: str) -> Mapping[str, str]:
    texts = isinstance(test, Mapping) and all(isinstance(value, str) for value in test.values())
    if isinstance(test, Mapping) and texts and ("assert" in test or "output" in test):
        return test
    raise DataError(
        f"item {item}: a test of code has `output` (and `input`), or `assert`, as text; this one is {test!r:.200}"
    )
