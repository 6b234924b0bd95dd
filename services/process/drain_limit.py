"""Ends a process that should drain and cannot, because its event loop or a thread hangs.

A thread of its own learns of SIGTERM, SIGINT and the end of the supervisor by files (`signal.set_wakeup_fd`, standard
input), so a blocked event loop cannot keep it from it. After the limit it logs where every thread stands and ends the
process. What holds the interpreter itself holds this thread, too; then the supervisor or the reaper kills.
"""

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.pipeline.runtime.exit_note import note_exit

__all__ = ["limited_drain"]

log = logging.getLogger("lachesis")

_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@contextmanager
def limited_drain(limit_s: float, code: int, *, supervised: bool) -> Iterator[None]:
    """End this process with exit `code` when it does not end by itself.

    It has `limit_s` seconds from the request to drain, or from the end of the body.

    To be entered by the main thread once the event loop has its signal handlers. `supervised`: the end of standard
    input is a request to drain, too.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watched = sys.stdin.fileno() if supervised else None
    threading.Thread(
        target=_watch, args=(ours, before, watched, limit_s, code), name="drain-limit", daemon=True
    ).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()


def _watch(ours: socket.socket, loop: int, supervisor: int | None, limit_s: float, code: int) -> None:
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    if supervisor is not None:
        poll.register(supervisor, 0)  # only whether its other end is closed
    end_s: float | None = None
    while end_s is None or time.monotonic() < end_s:
        for descriptor, _ in poll.poll(None if end_s is None else max(0.0, 1e3 * (end_s - time.monotonic()))):
            told = True
            if descriptor == ours.fileno() and (numbers := ours.recv(4096)):
                told = bool(_SIGNALS & set(numbers))
                if loop >= 0:
                    os.write(loop, numbers)  # to the event loop's own handlers
            else:
                poll.unregister(descriptor)
            if told and end_s is None:
                end_s = time.monotonic() + limit_s
    faulthandler.dump_traceback(all_threads=True)
    log.error("killed: it had not ended after %g s of draining, because a thread or the event loop cannot be stopped; "
              "what was not finished is done again. Above is where it stood", limit_s)  # fmt: skip
    note_exit(code)
    os._exit(code)
