"""A small process above each service, which ends whatever the service started and left behind.

`start_below_reaper` forks: the service is the child, the parent is its reaper. Guarantees that no descendant of the
service is alive once its end is reported, however the service ended and however a descendant left it (a session of its
own, a double fork): the kernel gives orphans to the reaper (PR_SET_CHILD_SUBREAPER), which ends them, SIGTERM first.
If the reaper is killed, so is the service (PR_SET_PDEATHSIG). If the supervisor is gone, the service drains; one that
cannot is killed after `limit_s` more seconds, even if it is stopped.

Only descendants are ever signalled, each by a pidfd after a look at its start time, so no later process of the same
pid can be hit.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from setproctitle import setproctitle

__all__ = ["LOG_NAME", "ReaperStarted", "ServiceEnded", "end_descendants", "start_below_reaper", "take_orphans"]

LOG_NAME = "reaper"
"""In lines of the service's log that come from its reaper."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TERM_S = 1.0
"""Seconds that what is left behind has from SIGTERM to SIGKILL."""
_KILL_S = 10.0
"""Seconds for which it is killed again and again: it may fork meanwhile, or wait for a disk."""
_LOOK_S = 0.01
_MAX_NAMED = 5


class ReaperStarted(msgspec.Struct, frozen=True, tag=True):
    """The first message of a reaper: the service's pid, with a pidfd of it, and its own."""

    pid: int
    reaper: int


class ServiceEnded(msgspec.Struct, frozen=True, tag=True):
    """The last message: the exit code as `subprocess` has it, -n where signal n ended the service."""

    code: int


@dataclass(frozen=True, slots=True)
class _Descendant:
    pid: int
    started: str
    name: str


def take_orphans() -> None:
    """Let the kernel give this process the orphans among its descendants (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_below_reaper(channel: socket.socket, limit_s: float, title: str) -> None:
    """Fork, and return in the child; the parent, called `title`, reports on `channel` and never returns.

    It ends with the exit code of the child, 128 and the number of the signal that ended it, as a shell's.
    """
    take_orphans()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        code = 1
        try:
            setproctitle(title)
            code = _watch(channel, pid, limit_s)
        finally:
            os._exit(code)
    channel.close()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was killed before the line above took effect
        os._exit(1)


def end_descendants(spared: Collection[int] = ()) -> list[str]:
    """End all descendants of this process and return their names.

    Not its children `spared` and what those started. Reaps those that become its children.
    """
    found: dict[int, str] = {}
    began_s = time.monotonic()
    while (left := list(_descendants(spared))) and time.monotonic() - began_s < _KILL_S:
        late = time.monotonic() - began_s > _TERM_S
        for one in left:
            if late or one.pid not in found:
                found[one.pid] = one.name
                _signal(one, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(_LOOK_S)
        for one in left:
            with suppress(ChildProcessError):  # its parent is another one of them, as long as that lives
                os.waitpid(one.pid, os.WNOHANG)
    return list(found.values())


def _descendants(spared: Collection[int]) -> Iterator[_Descendant]:
    """Yield the descendants that have not been reaped, parents before children."""
    children: dict[int, list[_Descendant]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))) is not None:
            name, rest = fields
            children.setdefault(int(rest[1]), []).append(_Descendant(int(entry.name), rest[19], name))
    below = [one for one in children.get(os.getpid(), ()) if one.pid not in spared]
    while below:
        one = below.pop()
        yield one
        below += children.get(one.pid, ())


def _stat(pid: int) -> tuple[str, list[str]] | None:
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    return name.partition("(")[2], rest.split()


def _signal(one: _Descendant, number: signal.Signals) -> None:
    try:
        pidfd = os.pidfd_open(one.pid)
    except OSError:
        return
    try:
        stat = _stat(one.pid)
        if stat is not None and stat[1][19] == one.started:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:  # it has just ended, or belongs to another user, as what `sudo` started
        pass
    finally:
        os.close(pidfd)


def _watch(channel: socket.socket, pid: int, limit_s: float) -> int:
    """Wait for the end of the service, end what it left, and report."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # those are the service's
        signal.signal(number, signal.SIG_IGN)
    service = os.pidfd_open(pid)
    _keep_open(0, 1, 2, service, channel.fileno())
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    _send(channel, ReaperStarted(pid, os.getpid()), service)
    status = _until_ended(channel, pid, service, woken, limit_s)
    left = end_descendants()
    if left:
        names = ", ".join(left[:_MAX_NAMED]) + (", ..." if len(left) > _MAX_NAMED else "")
        _log("INFO", f"ended {len(left)} processes that it had left behind: {names}")
    code = os.waitstatus_to_exitcode(status)
    _send(channel, ServiceEnded(code))
    return code if code >= 0 else 128 - code


def _until_ended(channel: socket.socket, pid: int, service: int, woken: int, limit_s: float) -> int:
    """Reap until the service has ended; return its wait status. Kill it when it outlives its supervisor for long."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(channel, select.POLLIN)
    kill_at_s: float | None = None
    while True:
        while (reaped := _reap()) is not None:
            if reaped[0] == pid:
                return reaped[1]
        left_s = None if kill_at_s is None else kill_at_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            _log("ERROR", "killed the service: it did not drain after the supervisor was gone")
            signal.pidfd_send_signal(service, signal.SIGKILL)
            kill_at_s = left_s = None
        for descriptor, _ in poll.poll(None if left_s is None else 1e3 * left_s):
            if descriptor == channel.fileno():  # nothing is ever sent there: it has ended
                poll.unregister(channel)
                kill_at_s = time.monotonic() + limit_s
            else:
                os.read(woken, 4096)


def _log(level: str, text: str) -> None:
    """Write a line into the service's log, in its form."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 {level} {LOG_NAME} {text}", file=sys.stderr, flush=True)


def _reap() -> tuple[int, int] | None:
    pid, status = os.waitpid(-1, os.WNOHANG)  # the service is there until it is reaped here
    return (pid, status) if pid else None


def _keep_open(*kept: int) -> None:
    """Close all other files: the ends of pipes among them would keep others from noticing the service's end."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        if int(name) not in kept:
            with suppress(OSError):  # the one of the listing itself
                os.close(int(name))


def _send(channel: socket.socket, message: ReaperStarted | ServiceEnded, *descriptors: int) -> None:
    with suppress(OSError):  # the supervisor is gone
        socket.send_fds(channel, [msgspec.json.encode(message)], descriptors)
