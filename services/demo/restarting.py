"""The supervisor as a process of its own, started again when it dies before the run is finished.

Guarantees that its end, however it comes, is noticed; that it is never running when `keep_supervisor` has returned or
was cancelled: it is then told to drain, and killed if it does not in time. Its services notice its death by themselves.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from lachesis.pipeline.config.load import PREFIX
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.disk import write_when_room
from lachesis.services.process.service_process import EXIT_STARTUP

__all__ = ["LOG", "keep_supervisor"]

LOG = "supervisor.log"
MAX_DEATHS = 8
_PAUSE_S = 1.0
_MARGIN_S = 15.0

Beside = Callable[[int], Coroutine[Any, Any, None]]


async def keep_supervisor(config: RunConfig, file: Path, beside: Beside, came_up: Callable[[], bool]) -> int:
    """Run `lachesis up` on the configuration `file` until the run is finished; return its exit code.

    `beside` runs with each life of the supervisor and gets its pid. A start that fails before `came_up` is not
    repeated: the same would fail again.
    """
    for _ in range(MAX_DEATHS):
        code = await _one_life(config, file, beside)
        if code == 0 or (code == EXIT_STARTUP and not came_up()):
            return code
        await anyio.sleep(_PAUSE_S)
    return code


async def _one_life(config: RunConfig, file: Path, beside: Beside) -> int:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}  # they are in the file
    log_file = config.path / LOG
    with await write_when_room(log_file, partial(log_file.open, "ab")) as log:
        process = await anyio.open_process(
            [sys.executable, "-m", "lachesis", "up", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,  # Ctrl-C is the demo's, which stops it in order
        )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beside, process.pid)
            code = await process.wait()
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, config.training.drain_s + 2 * config.services.drain_s + _MARGIN_S)
    return code


async def _stop(process: anyio.abc.Process, patience_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second one kills what does not drain
        if process.returncode is None:
            process.send_signal(number)
            with anyio.move_on_after(patience_s):
                await process.wait()
    await process.wait()
