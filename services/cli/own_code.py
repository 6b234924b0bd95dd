"""Runs a command that loads a user's code in a child process, and says if that code ends it."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["guard_own_code", "runs_own_code"]

_COMMANDS = (("dev",), ("env", "verify"), ("env", "test"))


def runs_own_code(arguments: Sequence[str]) -> bool:
    """Return whether a command runs a user's code in its own process."""
    return any(tuple(arguments[: len(command)]) == command for command in _COMMANDS)


@contextmanager
def guard_own_code() -> Iterator[None]:
    """Run the body in a child process, for whose end this one waits; it then exits with its code.

    Where code of the user's has ended the child (os._exit, exec, a crash), that is said, and the code is 1.
    """
    # here: the help of every command needs neither
    from lachesis.pipeline.common.child_process import die_with_parent
    from lachesis.pipeline.common.user_code import mark_own_process

    ours, theirs = os.pipe()
    parent = os.getpid()
    arm = die_with_parent(signal.SIGKILL, parent=parent)
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        if arm is not None:
            arm()
        child = os.getpid()
        mark_own_process("lachesis")
        try:
            yield
        finally:
            if os.getpid() != child:  # forked by the user's code, and come back
                os._exit(1)
            os.write(theirs, b".")
            os.close(theirs)
        return
    os.close(theirs)
    for number in (signal.SIGINT, signal.SIGQUIT):  # the child has them from the terminal as well
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    os.set_blocking(ours, False)
    try:
        noted = os.read(ours, 1) == b"."
    except BlockingIOError:  # what it has started holds the pipe open
        noted = False
    if not noted and code not in {-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT}:
        how = f"crashed it: {signal.Signals(-code).name}" if code < 0 else f"ended it with code {code}"
        print(
            f"lachesis: code of the environment {how} (by os._exit, exec or a crash), where it was to return or raise",
            file=sys.stderr,
        )
        code = 1
    sys.exit(code if code >= 0 else 128 - code)
