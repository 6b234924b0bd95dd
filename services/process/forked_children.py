"""Keeps processes that a user's code forks, a pool of them say, from acting as the service.

A forked process has its parent's signal handlers, and the pipe by which they wake the parent's event loop: a pool that
ends its workers by SIGTERM would make the service drain. One that comes back from the user's code would go on with the
parent's event loop and connections: it is ended as soon as it gets there.
"""

import asyncio
import os
import signal
from functools import cache

import anyio

from lachesis.pipeline.common.stop_signals import stop_signals
from lachesis.pipeline.common.user_code import fork_reports, forks_that_returned, refuse_forked
from lachesis.pipeline.runtime.service import Service

__all__ = ["separate_forked_children", "tell_returned_forks"]

_SAID_S = 60.0
"""Seconds for which a fork that came back is reported."""

_loops: list[asyncio.AbstractEventLoop] = []
"""The event loop of this process, once there is one."""


def separate_forked_children() -> None:
    """Let processes that this one forks end by the signals that drain it, and never run its loop."""
    _loops[:] = [asyncio.get_running_loop()]
    _register()


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_separate)


def _separate() -> None:
    signal.set_wakeup_fd(-1)
    for number in stop_signals():
        signal.signal(number, signal.SIG_DFL)
    for loop in _loops:
        ready, selector = getattr(loop, "_ready", None), getattr(loop, "_selector", None)
        if ready is not None and selector is not None:  # asyncio's own; what is forked runs none of its callbacks
            ready.clear()
            selector.select = _end


async def tell_returned_forks(service: Service) -> None:
    """Say by a notice which code forks the service and comes back. Runs until cancelled."""
    total, reports = 0, fork_reports()
    while reports is not None:
        await anyio.wait_readable(reports)
        if found := forks_that_returned():
            total += len(found)
            processes = "1 process" if total == 1 else f"{total} processes"
            service.set_problem(
                "forked",
                f"{found[-1]} has forked {processes} that came back into the service; such are ended",
                mend="what is forked must end by os._exit; use subprocess or multiprocessing instead of os.fork",
                for_s=_SAID_S,
            )


def _end(_: object = None) -> None:
    refuse_forked("code that it runs")
