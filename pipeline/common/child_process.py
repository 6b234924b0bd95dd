"""Ends a child process with the process that started it, however that one ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, *, parent: int | None = None) -> Callable[[], None] | None:
    """Return a function that makes a child receive this signal when `parent` is killed (Linux only).

    `parent` is a pid; None is this process.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    expected = os.getpid() if parent is None else parent

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != expected:  # killed before the line above took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return arm
