"""Reports to the supervisor the exit code with which a process is about to end.

An exit code alone says nothing: user code in the process may end it with any. So a supervisor believes a code only if
the process has noted it on the socket that is its standard input; the supervisor holds the other end.
"""

import os
import socket
import stat
from contextlib import suppress

__all__ = ["is_supervised_by_socket", "note_exit", "read_exit_note"]

_WORD = b"exit"
_MAX_BYTES = 1 << 16
_STDIN = 0
_noting = False


def is_supervised_by_socket() -> bool:
    """Note exits of this process from now on, if its standard input is a socket. Return whether it is."""
    global _noting  # noqa: PLW0603 - a fact of this process
    with suppress(OSError):
        _noting = stat.S_ISSOCK(os.fstat(_STDIN).st_mode)
    return _noting


def note_exit(code: int) -> None:
    """Report to the supervisor, if there is one, that this process ends with `code` now."""
    if _noting:
        with suppress(OSError):  # it is gone
            os.write(_STDIN, b"%s %d %d\n" % (_WORD, os.getpid(), code))


def read_exit_note(descriptor: int, pid: int) -> int | None:
    """Return the code that process `pid` has noted at the other end; None: it has noted none."""
    data = b""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
        other.setblocking(False)
        while len(data) < _MAX_BYTES and (part := other.recv(_MAX_BYTES)):
            data += part
    noted = None
    for line in data.splitlines():
        match line.split():
            case [word, by, code] if word == _WORD and by == b"%d" % pid and code.isdigit():
                noted = int(code)
            case _:
                continue
    return noted
