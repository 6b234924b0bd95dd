"""Keeps what a user's code forks, a pool of processes say, from passing its signals on to the service.

A forked process has its parent's signal handlers, and the pipe by which they wake the parent's event loop: a pool that
ends its workers by SIGTERM would make the service drain.
"""

import os
import signal
from functools import cache

__all__ = ["separate_forked_children"]


@cache
def separate_forked_children() -> None:
    """Let processes that this one forks from now on end by the signals that drain it."""
    os.register_at_fork(after_in_child=_take_default_signals)


def _take_default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
