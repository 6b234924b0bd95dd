"""Gives a process a unique name, and checks whether the process of a name still runs here."""

import os
from functools import cache
from pathlib import Path

__all__ = ["is_running", "machine_id", "started_ticks"]

_PROC = Path("/proc")


@cache
def machine_id() -> str:
    """Return what names this boot of this machine and the space of pids that this process sees.

    Empty: unknown.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


def started_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    None if it has ended, or that is not known here.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def is_running(machine: str, pid: int, started: int) -> bool | None:
    """Return whether the process of that name runs.

    None if it is on a machine of which nothing is known here.
    """
    if not machine or machine != machine_id() or not (_PROC / str(os.getpid())).exists():
        return None
    return started_ticks(pid) == started
