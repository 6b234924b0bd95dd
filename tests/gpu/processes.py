"""Processes that a part starts, and ends with all that they have started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

__all__ = ["end_group", "started"]

_PATIENCE_S = 10.0


@contextmanager
def started(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run commands beside each other; what they print goes to standard error. They are ended with the context."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), start_new_session=True
            )
            running.append(process)
        yield running
    finally:
        for process in running:
            end_group(process)


def end_group(process: "subprocess.Popen[bytes]", patience_s: float = _PATIENCE_S) -> None:
    """End a process that leads a session, and whatever it has started: first by SIGTERM, then by SIGKILL."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:  # those that made a session of their own
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(family, patience_s)  # a GPU's memory is free once they are gone
