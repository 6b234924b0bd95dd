"""Keeps the process of an Atropos environment alive: starts, watches and replaces it.

Guarantees that a request for a group ends with the environment's group, or with an InfrastructureError if its process
was killed, ended or hung, which costs only the groups under way; that a process that hangs is named in the log, with
the stacks of its threads, and replaced; that its output is in the log; and that no process outlives the run.
"""

import itertools
import logging
import math
import os
import signal
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectSendStream

from lachesis.pipeline.common.backoff import RetryPolicy
from lachesis.pipeline.common.safe_text import printable_lines
from lachesis.pipeline.environment.inference_requests import ModelTurn
from lachesis.pipeline.errors import EnvironmentCodeError, InfrastructureError
from lachesis.pipeline.extensions.atropos.native.frames import (
    Generate,
    GroupError,
    Groups,
    Pong,
    Ready,
    SetupError,
    packed,
    read_frames,
)
from lachesis.schemas.errors import ConfigError, DataError, LachesisError

__all__ = ["Answer", "AtroposProcess"]

log = logging.getLogger("lachesis")

Answer = Callable[[Generate], Awaitable[Sequence[ModelTurn]]]
"""Samples the completions that a request of the environment wants."""
_UNSAMPLED = 1.0
"""Atropos' value in place of a logprob for a token that was not sampled."""
_CHILD = Path(__file__).with_name("child.py")
_START_S = 600.0
"""Seconds that imports and `setup` may take."""
_ANSWERED_S = 1.0
"""Seconds for reading an answer that has come in time."""
_LAST_WORDS_S = 2.0
"""Seconds for which the output of a process that is being replaced is still read."""
_PAUSE_S = 0.2
"""A pause in that output after which no more of it comes."""
_MAX_LINE_BYTES = 8192
_LINES_QUOTED = 12
_MAX_LIVES = 5
"""Processes in a row without a single group, after which the environment's service ends."""
_RESTARTS = RetryPolicy(first_s=0.5, longest_s=30.0, jitter=0.5)
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, BrokenPipeError, ProcessLookupError)


class AtroposProcess:
    """Run `run` in a task beside the requests for groups. `start` is the first message to `child`."""

    def __init__(self, name: str, python: str, start: dict[str, Any], *, hang_s: float) -> None:
        self.name = name
        self.ready: Ready | None = None
        self.lives = 0
        self.pid: int | None = None
        self._python = python
        self._start = start
        self._hang_s = hang_s
        self._numbers = itertools.count()
        self._groups: dict[int, MemoryObjectSendStream[Generate | Groups | GroupError]] = {}
        self._up = anyio.Event()
        self._heard = anyio.Event()
        self._dumped = anyio.Event()
        self._printed = anyio.Event()
        self._process: anyio.abc.Process | None = None
        self._sending = anyio.Lock()
        self._lines: deque[str] = deque(maxlen=_LINES_QUOTED)
        self._made = False
        self._why = ""

    async def run(self) -> None:
        """Keep a process until cancelled.

        Raises ConfigError when the environment cannot be made, and EnvironmentCodeError when process after process ends
        without a group.
        """
        fruitless = 0
        while True:
            self._made = False
            await self._live()
            fruitless = 0 if self._made else fruitless + 1
            if fruitless >= _MAX_LIVES:
                raise EnvironmentCodeError(
                    f"{self.name}: {fruitless} processes in a row ended without a group; the last one {self._why}"
                )
            log.warning("%s: its process %s; another one is started", self.name, self._why)
            if fruitless:
                await anyio.sleep(_RESTARTS.pause_s(fruitless))

    async def up(self) -> None:
        """Wait until the environment is set up."""
        await self._up.wait()

    async def collect(self, index: int, n: int, answer: Answer) -> Groups:
        """Return the groups of `n` that the environment makes of item `index`.

        `answer` serves its requests meanwhile; what that raises ends the request. Raises InfrastructureError when the
        process ends before, EnvironmentCodeError when the environment's code raises.
        """
        await self._up.wait()
        number = next(self._numbers)
        send, receive = anyio.create_memory_object_stream[Generate | Groups | GroupError](math.inf)
        self._groups[number] = send
        result: Groups | GroupError | None = None
        with send, receive:
            try:
                await self._send(op="collect", id=number, index=index, n=n)
                async with anyio.create_task_group() as tasks:
                    async for message in receive:
                        if not isinstance(message, Generate):
                            result = message
                            break
                        tasks.start_soon(self._answer, message, answer)
                    tasks.cancel_scope.cancel()
            finally:
                self._groups.pop(number, None)
                if result is None:
                    with anyio.CancelScope(shield=True), suppress(InfrastructureError):
                        await self._send(op="cancel", id=number)
        if isinstance(result, GroupError):
            log.warning("%s, item %d: %s", self.name, index, printable_lines(result.trace))
            raise EnvironmentCodeError(f"{self.name}, item {index}: {result.error}")
        if result is None:
            raise InfrastructureError(f"{self.name}: its process {self._why}")
        self._made = True
        return result

    async def _answer(self, request: Generate, answer: Answer) -> None:
        try:
            turns = await answer(request)
        except LachesisError as error:
            with suppress(InfrastructureError):
                await self._send(op="refused", id=request.id, error=str(error))
            raise
        samples = [
            {
                "token_ids": turn.token_ids,
                "logprobs": [_UNSAMPLED if math.isnan(one) else one for one in turn.logprobs],
                "text": turn.text,
                "finish_reason": turn.finish_reason,
            }
            for turn in turns
        ]
        with suppress(InfrastructureError):  # its process ended: the request raises that
            await self._send(op="generated", id=request.id, samples=samples)

    async def _send(self, **message: Any) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise InfrastructureError(f"{self.name}: its process {self._why}")
        try:
            async with self._sending:
                await process.stdin.send(packed(**message))
        except _BROKEN as error:
            raise InfrastructureError(f"{self.name}: its process ended") from error

    async def _live(self) -> None:
        """Start a process, and return when it has ended for whatever reason."""
        self._why = "has not started yet"
        environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1"}
        # a session of its own: Ctrl-C is for the run, and whatever the environment starts can be ended with it
        self._process = process = await anyio.open_process(
            [self._python, str(_CHILD)], env=environ, start_new_session=True
        )
        self.pid, self.lives = process.pid, self.lives + 1
        drained = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read_log, process, drained)
                tasks.start_soon(self._watch, process)
                await self._send(**self._start)
                await self._read(process)
                with anyio.move_on_after(_LAST_WORDS_S):
                    await drained.wait()
                tasks.cancel_scope.cancel()
        except InfrastructureError:
            self._why = "ended before its first message reached it"
        finally:
            self._process, self.pid, self._up, self.ready = None, None, anyio.Event(), None
            with anyio.CancelScope(shield=True):
                _kill(process)
                status = await process.wait()
                await process.aclose()
            if not self._why:
                self._why = f"{process.pid} ended ({_describe(status)}){self._quoted()}"
            for send in list(self._groups.values()):
                send.close()

    async def _read(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        self._why = ""
        frames = read_frames(process.stdout)
        assert isinstance(frames, AsyncGenerator)  # noqa: S101
        try:
            async with aclosing(frames):
                async for message in frames:
                    self._deliver(message)
        except DataError as error:
            self._why = f"{process.pid} sent {error}"

    def _deliver(self, message: Any) -> None:
        match message:
            case Ready():
                log.info("%s: its process %s is ready", self.name, self.pid)
                self.ready = message
                self._up.set()
            case SetupError():
                raise ConfigError(f"{self.name}: {message.error}\n{printable_lines(message.trace)}")
            case Pong():
                self._heard.set()
            case Generate():
                if message.group in self._groups:
                    self._groups[message.group].send_nowait(message)
            case Groups() | GroupError():
                if message.id in self._groups:
                    self._groups[message.id].send_nowait(message)

    async def _watch(self, process: anyio.abc.Process) -> None:
        """Kill the process when it does not get ready, or later does not answer."""
        with anyio.move_on_after(_START_S) as starting:
            await self._up.wait()
        if starting.cancelled_caught:
            return await self._replace(process, f"was not ready after {_START_S:g} s")
        while True:
            await anyio.sleep(self._hang_s / 4)
            self._heard = anyio.Event()
            with anyio.move_on_after(self._hang_s) as waiting, suppress(InfrastructureError):
                await self._send(op="ping")
                await self._heard.wait()
            if waiting.cancelled_caught:
                with anyio.move_on_after(_ANSWERED_S):  # this loop itself may have been held between two steps
                    await self._heard.wait()
                if not self._heard.is_set():
                    return await self._replace(process, f"did not answer for {self._hang_s:g} s")

    async def _replace(self, process: anyio.abc.Process, what: str) -> None:
        """Log where each thread of the process is, and kill it."""
        self._why = f"{process.pid} {what}"
        log.error("%s: its process %d %s; where its threads are:", self.name, process.pid, what)
        self._dumped = anyio.Event()
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._dumped.wait()
            await self._until_quiet()
        _kill(process)

    async def _until_quiet(self) -> None:
        """Wait until the process writes no more lines: the stacks of its threads come one after the other."""
        paused = False
        while not paused:
            self._printed = anyio.Event()
            with anyio.move_on_after(_PAUSE_S) as pause:
                await self._printed.wait()
            paused = pause.cancelled_caught

    async def _read_log(self, process: anyio.abc.Process, drained: anyio.Event) -> None:
        assert process.stderr is not None  # noqa: S101 - it is a pipe
        rest = b""
        with suppress(anyio.EndOfStream, *_BROKEN):
            while True:
                *lines, rest = (rest + await process.stderr.receive()).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._log_line(line)
        if rest:
            self._log_line(rest)
        drained.set()

    def _log_line(self, line: bytes) -> None:
        text = printable_lines(line[:_MAX_LINE_BYTES].decode(errors="replace"))
        self._lines.append(text)
        log.info("%s: %s", self.name, text)
        self._printed.set()
        if text.startswith(("Current thread", "Thread ")):
            self._dumped.set()

    def _quoted(self) -> str:
        return "; it printed at last:\n" + "\n".join(self._lines) if self._lines else ""


def _kill(process: anyio.abc.Process) -> None:
    """Kill the process and what it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
