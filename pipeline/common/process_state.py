"""Reads how the kernel says that a process of this machine stands."""

from pathlib import Path
from typing import Final

__all__ = ["STOPPED_STATES", "process_state"]

STOPPED_STATES: Final = frozenset({"T", "t"})
"""Letters of proc(5) of a process that a signal or a debugger stopped."""
_PROC = Path("/proc")


def process_state(pid: int) -> str:
    """Return the kernel's state of a process, a letter of proc(5).

    Empty if it has ended, or that is not known here.
    """
    try:
        state = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return "" if state in {"Z", "X"} else state
