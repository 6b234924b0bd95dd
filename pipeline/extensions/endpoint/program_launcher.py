"""Starts an agent's program, and ends with it all that it has started.

Usage: `python program_launcher.py COMMAND...`. Standard input is a socket to the process that wants the program. When
that process closes it, or is killed, the program is ended. Guarantees on Linux that when this process exits, nothing is
left that the program has started, wherever it has gone: an orphan among its descendants becomes a child of this process
(PR_SET_CHILD_SUBREAPER). Elsewhere only the program's process group is ended. On the socket it reports the program's
exit status and the number of processes that had left its group and were killed, or the error of a command that cannot
be started. It imports the standard library alone, so that it starts quickly.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

_SUBREAPER, _DEATH_SIGNAL = 36, 1
"""Numbers of `prctl` on Linux: orphans become children of this process; a signal at the end of the parent."""
_LOOK_S = 0.05
"""Longest wait between two looks at what is left."""


def main() -> None:
    """Run the command until it exits or is no longer wanted."""
    control, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
    child_ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    _prctl(_SUBREAPER, 1)
    os.dup2(null, 0)
    try:
        program = subprocess.Popen(  # held, since it would wait for its process otherwise
            sys.argv[1:],
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - there are no threads here
        )
    except OSError as error:
        _report(control, errno=error.errno)
        return
    os.dup2(null, 1)  # the program alone holds its output open
    os.dup2(null, 2)
    leader, ended = program.pid, dict[int, int]()
    while leader not in ended and not _is_unwanted(control, child_ended):
        _reap(ended)
    left = _end_all(leader, ended, child_ended)
    with suppress(OSError):
        status = os.waitstatus_to_exitcode(ended.get(leader, signal.SIGKILL))
        _report(control, status=status, left=left)


def _report(control: int, **said: int | None) -> None:
    os.write(control, json.dumps(said).encode())


def _end_with_parent() -> None:
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _is_unwanted(control: int, child_ended: int) -> bool:
    """Wait until a child ends, or nothing wants the program any more; return whether it is that."""
    ready, _, _ = select.select([control, child_ended], [], [])
    if child_ended in ready:
        os.read(child_ended, 4096)
    try:
        return control in ready and not os.read(control, 64)
    except ConnectionError:
        return True


def _reap(ended: dict[int, int]) -> bool:
    """Add the wait status of each child that has ended; return whether there are others."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        ended[pid] = status


def _end_all(leader: int, ended: dict[int, int], child_ended: int) -> int:
    """Kill the program and all that it has started; return how many of them had left its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    left, immortal = set[int](), set[int]()
    while _reap(ended):
        found = _children()
        for pid, group in found.items():
            try:
                os.kill(pid, signal.SIGKILL)  # what it has started is a child of this process then
            except PermissionError:  # another user's by now
                immortal.add(pid)
            if group != leader:
                left.add(pid)
        if found and found.keys() <= immortal:
            break
        if select.select([child_ended], [], [], _LOOK_S)[0]:
            os.read(child_ended, 4096)
    return len(left)


def _children() -> dict[int, int]:
    """Return the process group of each child that has not ended, where the system shows them."""
    found, own = dict[int, int](), os.getpid()
    with suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
            if name.isdecimal():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - pathlib takes long to load
                    state, parent, group = file.read().rpartition(b") ")[2].split()[:3]
                    if int(parent) == own and state not in b"ZX":
                        found[int(name)] = int(group)
    return found


def _prctl(option: int, value: int) -> None:
    """Set a property of this process, where the system knows it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
