"""Reads how the kernel says that a process of this machine stands."""

from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["FROZEN", "STOPPED_STATES", "describe_stop", "process_state"]

FROZEN: Final = "F"
"""No letter of proc(5): the control group of the process is frozen, as `docker pause` does."""
STOPPED_STATES: Final = frozenset({"T", "t", FROZEN})
"""States of a process that a signal, a debugger or its control group stopped."""
_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


def process_state(pid: int) -> str:
    """Return the kernel's state of a process, a letter of proc(5) or `FROZEN`.

    Empty if it has ended, or that is not known here.
    """
    try:
        state = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    if state in {"Z", "X"}:
        return ""
    return FROZEN if state in {"D", "S"} and _is_frozen(pid) else state


def describe_stop(pid: int, state: str) -> tuple[str, str]:
    """Return what stopped a process that is in one of `STOPPED_STATES`, and how it goes on."""
    if state == FROZEN:
        return (
            f"the control group of its process {pid} is frozen",
            "thaw it, as `docker unpause` or `systemctl thaw` do",
        )
    return f"a signal or a debugger stopped its process {pid}", f"`kill -CONT {pid}` lets it go on"


def _is_frozen(pid: int) -> bool:
    try:
        lines = (_PROC / str(pid) / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, path = line.split(":", 2)
        group = path.lstrip("/")
        with suppress(OSError):
            if controllers == "freezer" and "FROZEN" in (_GROUPS / "freezer" / group / "freezer.state").read_text():
                return True
        for root in (_GROUPS, _GROUPS / "unified") if not controllers else ():
            with suppress(OSError):
                if "frozen 1" in (root / group / "cgroup.events").read_text():
                    return True
    return False
