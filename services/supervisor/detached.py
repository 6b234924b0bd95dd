"""Starts a run in the background, and stops any run of this machine.

Guarantees that a run that was started goes on without the terminal and the process that started it; that `start_run`
returns when the run says that it is ready, or raises with what it said when it ended before; that nothing is signalled
but the process that wrote its name into the run's folder; and that `stop_run` returns when that has ended.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import IO

import anyio
import anyio.abc

from lachesis.pipeline.common.disk import write_when_room
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.errors import NotFoundError, StartupError
from lachesis.services.observe.run_state import RunState
from lachesis.services.observe.runs import look_at_folder
from lachesis.services.run.supervisor_state import (
    KEEPER_FILE,
    STATE_FILE,
    SUPERVISOR_LOG,
    ProcessRecord,
    SupervisorState,
    read_record,
)
from lachesis.services.supervisor.log_limit import read_tail

__all__ = ["start_run", "stop_run"]

Tell = Callable[[str], None]
_LOOK_S = 0.2
"""Seconds between two looks at a run that is stopping."""
_TAIL_LINES = 15


async def start_run(config: RunConfig, arguments: Sequence[str], tell: Tell, *, wait: bool = True) -> RunState:
    """Start the run in the background and return how it stands once it is ready.

    `arguments`: what gives `lachesis up` the configuration; without `wait` it returns once the run has begun; `tell`
    gets a line at each step of the start. Raises `StartupError` if it runs already, or ends before it is ready, with
    what it said.
    """
    before = look_at_folder(config.run, config.path)
    if before.is_live:
        pid = "" if before.supervisor is None else f", its supervisor has pid {before.supervisor}"
        raise StartupError(
            f"run {config.run} is {before.state} already{pid}: watch it with `lachesis top --run {config.run}`, or end "
            f"it with `lachesis runs stop {config.run}`"
        )
    is_new = not config.path.exists()
    await write_when_room(config.path, partial(config.path.mkdir, parents=True, exist_ok=True))
    output = config.path / SUPERVISOR_LOG
    begun_at = output.stat().st_size if output.exists() else 0
    tell("checking what the run needs")
    with await write_when_room(output, partial(_append_to, output)) as log:
        async with _notifications() as (address, messages):
            with _keeper(arguments, log, address) as keeper:
                ended = await _until(keeper, messages, tell, wait=wait)
    if ended:
        said = read_tail(output, begun_at, _TAIL_LINES) or "nothing"
        if is_new and not (config.path / STATE_FILE).exists():  # it never began: nothing is left of the attempt
            output.unlink()
            config.path.rmdir()
        raise StartupError(f"run {config.run} did not start:\n{said}")
    return look_at_folder(config.run, config.path)


def _append_to(file: Path) -> IO[bytes]:
    return file.open("ab")


@asynccontextmanager
async def _notifications() -> AsyncIterator[tuple[str, anyio.abc.UNIXDatagramSocket]]:
    """Yield the address of a socket for notifications (sd_notify(3)), and the socket."""
    with tempfile.TemporaryDirectory(prefix="lachesis-") as folder:
        address = f"{folder}/notify"
        async with await anyio.create_unix_datagram_socket(local_path=address) as messages:
            yield address, messages


@contextmanager
def _keeper(arguments: Sequence[str], log: IO[bytes], address: str) -> Iterator[int]:
    """Start the process that keeps the supervisor, in a session of its own; yield a descriptor of it.

    Not by anyio, which would end it with this process.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lachesis", "runs", "keep", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**os.environ, "NOTIFY_SOCKET": address},
        start_new_session=True,
    )
    descriptor = os.pidfd_open(process.pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _until(keeper: int, messages: anyio.abc.UNIXDatagramSocket, tell: Tell, *, wait: bool) -> bool:
    """Wait until the run is ready, or without `wait` has begun; return whether it ended before."""
    ended = False

    async def watch(scope: anyio.CancelScope) -> None:
        nonlocal ended
        await anyio.wait_readable(keeper)
        ended = True
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch, tasks.cancel_scope)
        async for data, _ in messages:
            fields = dict(line.partition("=")[::2] for line in data.decode(errors="replace").splitlines())
            if "STATUS" in fields:
                tell(fields["STATUS"])
            if not wait or fields.get("READY") == "1":
                break
        tasks.cancel_scope.cancel()
    return ended


async def stop_run(run: str, folder: Path, tell: Tell, *, now: bool = False) -> RunState:
    """Stop a run in order and return how it stands when it has ended.

    `now`: nothing is left to drain. `tell` gets a line at each step of the stop. Raises `NotFoundError` if it does not
    run here.
    """
    keeper, supervisor = _processes(folder)
    if keeper is None and supervisor is None:
        overview = look_at_folder(run, folder)
        why = f": {overview.problem}" if overview.problem else f": it is {overview.state}"
        raise NotFoundError(f"run {run} does not run here{why}")
    if now:
        await _kill(folder, keeper, supervisor)
    else:
        _signal(keeper or supervisor, signal.SIGTERM)
    told = ""
    while any(process is not None for process in _processes(folder)):
        text = _progress(look_at_folder(run, folder))
        if text != told:
            tell(text)
            told = text
        await anyio.sleep(_LOOK_S)
    return look_at_folder(run, folder)


async def _kill(folder: Path, keeper: ProcessRecord | None, supervisor: ProcessRecord | None) -> None:
    """End the keeper first, so that nothing is started again; a supervisor that is signalled twice kills every
    process."""
    _signal(keeper, signal.SIGKILL)
    _signal(supervisor, signal.SIGTERM)
    while supervisor is not None and supervisor.runs:
        state = read_record(folder / STATE_FILE, SupervisorState)
        if state is None or state.phase in {"stopping", "ended"}:  # it has taken the first one in
            _signal(supervisor, signal.SIGTERM)
            return
        await anyio.sleep(_LOOK_S)


def _processes(folder: Path) -> tuple[ProcessRecord | None, ProcessRecord | None]:
    """Return the process that keeps the supervisor and the supervisor, None where they do not run here."""
    keeper = read_record(folder / KEEPER_FILE, ProcessRecord)
    state = read_record(folder / STATE_FILE, SupervisorState)
    supervisor = None if state is None else state.process
    return (
        keeper if keeper is not None and keeper.runs else None,
        supervisor if supervisor is not None and supervisor.runs else None,
    )


def _signal(process: ProcessRecord | None, number: signal.Signals) -> None:
    """Signal the process of that record, and no later one of its pid."""
    if process is None:
        return
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.runs:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def _progress(overview: RunState) -> str:
    left = [
        name for name, pid in overview.pids.items() if pid is not None and name not in {"supervisor", "nats-server"}
    ]
    return f"{overview.state}: {len(left)} processes left" + (f", {', '.join(sorted(left)[:4])}" if left else "")
