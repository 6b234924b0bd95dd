"""Keeps the process of a run's supervisor running: restarts it when something kills it.

Guarantees that its end, however it comes, is noticed; that it is never running when `keep_supervisor` has returned or
was cancelled: it is then requested to drain, and killed if it does not in time. Its services notice its death by
themselves, and the next supervisor goes on with them.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec

from lachesis.pipeline.common.disk import DeferredFile, write_when_room
from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.config.load import PREFIX
from lachesis.pipeline.config.run import RunConfig
from lachesis.services.run.run_file import run_file_of
from lachesis.services.run.supervisor_state import (
    KEEPER_FILE,
    STATE_FILE,
    SUPERVISOR_LOG,
    ProcessRecord,
    SupervisorState,
    read_record,
)
from lachesis.services.supervisor.restarts import ProcessLife, Restarts

__all__ = ["keep_detached", "keep_supervisor"]

log = logging.getLogger("lachesis")

_MARGIN_S = 15.0

Beside = Callable[[int], Coroutine[Any, Any, None]]


async def keep_supervisor(
    config: RunConfig, file: Path, beside: Beside | None = None, *, first: Sequence[str] = ()
) -> int:
    """Run `lachesis up` on the configuration `file` until it ends by itself; return its exit code.

    What kills it makes it start again. So does an end by itself before it is ready, if one before it was: what it takes
    over may need longer to be free, or its server to be back. `beside` runs with each life and gets its pid. `first`:
    its arguments until it has written `file`, with the settings among this process's variables.
    """
    history, was_ready = Restarts(), False
    life = _Life(config, first, dict(os.environ)) if first else _Life(config, ("--config", str(file)))
    while True:
        started = time.monotonic()
        pid, code = await life.run(beside)
        state = read_record(config.path / STATE_FILE, SupervisorState)
        has_begun = state is not None and state.process.pid == pid
        ready = has_begun and state is not None and state.ready == state.processes
        if code == 0 or (code > 0 and (ready or not was_ready)):
            return code
        if has_begun:
            life = _Life(config, ("--config", str(file)))
        was_ready |= ready
        pause_s = history.ended(ProcessLife(code, time.monotonic() - started, ready))
        if pause_s is None:
            log.error("the supervisor failed %d times in a row, and last with code %d", history.failures, code)
            return code
        log.warning("the supervisor ended with code %d; starting it again in %.1f s", code, pause_s)
        await anyio.sleep(pause_s)


async def keep_detached(config: RunConfig, arguments: Sequence[str]) -> int:
    """Keep the supervisor of a run in the background, until it ends by itself or this process is to end.

    `arguments`: those of the first `lachesis up`. A file in the run's folder names this process meanwhile. Returns the
    supervisor's exit code.
    """
    place, mine = config.path / KEEPER_FILE, ProcessRecord.current()
    DeferredFile(place).write(msgspec.json.encode(mine))
    code = 0
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_on_signal, tasks.cancel_scope)
            code = await keep_supervisor(config, run_file_of(config), first=arguments)
            tasks.cancel_scope.cancel()
    finally:
        if read_record(place, ProcessRecord) == mine:
            place.unlink(missing_ok=True)
    return code


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(*stop_signals()) as signals:
        async for _ in signals:
            scope.cancel()
            return


class _Life:
    """One life of a supervisor: what it is started with. `environ`: without settings, unless it is given."""

    def __init__(self, config: RunConfig, arguments: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self._config = config
        self._command = [sys.executable, "-P", "-m", "lachesis", "up", *arguments]
        without = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        self._environ = without if environ is None else environ

    async def run(self, beside: Beside | None) -> tuple[int, int]:
        """Return the pid and the exit code of a supervisor that was started and has ended."""
        log_file = self._config.path / SUPERVISOR_LOG
        with await write_when_room(log_file, partial(log_file.open, "ab")) as output:
            process = await anyio.open_process(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environ,
                start_new_session=True,  # Ctrl-C goes to the keeper, which stops it in order
            )
        try:
            async with anyio.create_task_group() as tasks:
                if beside is not None:
                    tasks.start_soon(beside, process.pid)
                code = await process.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process, _patience_s(self._config))
        return process.pid, code


def _patience_s(config: RunConfig) -> float:
    """Return how long a supervisor may take to stop in order, seconds."""
    return config.training.drain_s + 2 * config.services.drain_s + _MARGIN_S


async def _stop(process: anyio.abc.Process, within_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one kills what does not drain
        if process.returncode is None:
            process.send_signal(number)
            with anyio.move_on_after(within_s):
                await process.wait()
    await process.wait()
