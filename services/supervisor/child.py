"""A service's process as its supervisor has it: started below a reaper, which says how it ended.

Guarantees that `wait` returns once the process has ended and nothing that it started is alive, unless its reaper is
killed or stopped too.
"""

import os
import signal
import socket
from contextlib import suppress

import anyio
import msgspec
from anyio.abc import Process

from lachesis.pipeline.runtime.exit_note import read_exit_note
from lachesis.services.process.reaper import ReaperStarted, ServiceEnded

__all__ = ["ServiceProcess", "send_signal"]

_FIRST_S = 60.0
"""Seconds until a reaper must have forked the service: it may have to import packages first."""
_LAST_S = 15.0
"""Seconds from the service's end until a reaper must have ended what was left behind."""
_MESSAGE_BYTES = 1 << 12


class ServiceProcess:
    """A service below its reaper, with the part of anyio's `Process` that a supervisor needs."""

    def __init__(self, pid: int, pidfd: int, channel: socket.socket, stdin: int, above: Process | None) -> None:
        self.pid = pid
        self.noted: int | None = None
        """The exit code that it has noted, once it has ended."""
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._channel = channel
        self._stdin = stdin
        self._above = above

    @classmethod
    async def open(cls, channel: socket.socket, stdin: int, *, above: Process | None = None) -> "ServiceProcess | None":
        """Return the service that a reaper has started, None if it starts none.

        The reaper is at the other end of `channel`. The end of `stdin` shows the service that its supervisor is gone.
        `above`: the reaper's process, if this one has started it.
        """
        channel.setblocking(False)
        with anyio.move_on_after(_FIRST_S):
            match await _receive(channel):
                case ReaperStarted(pid, _), [pidfd]:
                    return cls(pid, pidfd, channel, stdin, above)
        channel.close()
        os.close(stdin)
        return None

    async def wait(self) -> int:
        """Wait for its end and return its exit code; it counts as killed if no report says how it ended."""
        if self.returncode is None:
            await anyio.wait_readable(self._pidfd)
            code = -int(signal.SIGKILL)
            with anyio.move_on_after(_LAST_S):
                match await _receive(self._channel):
                    case ServiceEnded(ended), _:
                        code = ended
            self.returncode = code
            os.close(self._pidfd)
            self._channel.close()
            self.noted = read_exit_note(self._stdin, self.pid)
            os.close(self._stdin)
            if self._above is not None:
                with suppress(ProcessLookupError):
                    self._above.kill()
                await self._above.aclose()
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        send_signal(self._pidfd, number)


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal a process unless it has just ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


async def _receive(channel: socket.socket) -> tuple[ReaperStarted | ServiceEnded, list[int]] | None:
    """Return the next message of a reaper with its descriptors; None when there will be none."""
    await anyio.wait_readable(channel)
    try:
        data, passed, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
    except ConnectionResetError:
        return None
    return (msgspec.json.decode(data, type=ReaperStarted | ServiceEnded), passed) if data else None
