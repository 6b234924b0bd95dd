"""Calls `lachesis` commands that print JSON, in processes of their own.

Guarantees that a tool says what its command says; that a command which answers with too much, or is cancelled, is
ended; and that nothing of it reaches this process's own output.
"""

import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import anyio
import anyio.abc
import msgspec

from lachesis.pipeline.common.safe_text import encodable
from lachesis.pipeline.errors import StartupError
from lachesis.schemas.errors import LachesisError

__all__ = ["CommandError", "call_command"]

MAX_OUTPUT_BYTES = 4 << 20
_MAX_ERROR_LINES = 20
_MAX_ERROR_BYTES = 1 << 16


class CommandError(LachesisError):
    """A command ended with an error; the text is what it said."""


async def call_command(*arguments: str, codes: Collection[int] = (0,), lines: bool = False) -> Any:
    """Return what a `lachesis` command prints as JSON; with `lines`, one document a line, as a list.

    Raises `CommandError` with what it said where its exit code is not among `codes`, or for arguments that no
    process can be given.
    """
    if any("\0" in one or encodable(one) != one for one in arguments):
        raise CommandError("the arguments hold characters that no command can be given")
    command = [sys.executable, "-P", "-m", "lachesis", *arguments]
    async with await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            async with anyio.create_task_group() as tasks:
                errors = _Output()
                tasks.start_soon(errors.read, process.stderr, _MAX_ERROR_BYTES)
                output = _Output(at_limit=process.kill)
                await output.read(process.stdout, MAX_OUTPUT_BYTES)
                code = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
    if output.is_cut:
        raise CommandError(f"the answer has more than {MAX_OUTPUT_BYTES} bytes: ask for less")
    said = "\n".join(errors.data.decode(errors="replace").splitlines()[-_MAX_ERROR_LINES:])
    if code not in codes:
        raise CommandError(said.removeprefix("lachesis: ") or f"lachesis {arguments[0]} ended with code {code}")
    try:
        if lines:
            return [msgspec.json.decode(line) for line in output.data.splitlines()]
        return msgspec.json.decode(output.data)
    except msgspec.DecodeError as error:
        raise CommandError(f"lachesis {arguments[0]} printed no JSON: {error}; {said}") from error


class _Output:
    """What a process printed: its last `limit` bytes or so. `at_limit` is called when there are more."""

    def __init__(self, at_limit: Callable[[], None] = lambda: None) -> None:
        self.data = b""
        self.is_cut = False
        self._at_limit = at_limit

    async def read(self, stream: anyio.abc.ByteReceiveStream | None, limit: int) -> None:
        """Read until the stream ends."""
        if stream is None:
            raise StartupError("the process was started without a pipe")
        parts: deque[bytes] = deque()
        size = 0
        async for part in stream:
            parts.append(part)
            size += len(part)
            while size > limit:
                size -= len(parts.popleft())
                self._cut()
        self.data = b"".join(parts)

    def _cut(self) -> None:
        if not self.is_cut:
            self.is_cut = True
            self._at_limit()
