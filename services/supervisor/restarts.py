"""When to start a process again that ended, and when to give up. Pure.

Guarantees that a process which cannot run ends the run instead of being started for ever, and that kills from outside
do not: however many there are, they say nothing about the process. A process that came up and was killed (SIGKILL) was
killed from outside unless the kernel did it for lack of memory, which the kernel counts. One that another process
keeps from its place waits: that is its last life, which drains, where the supervisor before this one was killed. So
does one that met a full disk: that says nothing about it either.
"""

import signal
from dataclasses import dataclass
from pathlib import Path

from lachesis.services.process.service_process import EXIT_FENCED, EXIT_NO_ROOM, EXIT_OWN_CODE, EXIT_STARTUP

__all__ = ["MAX_FAILURES", "ProcessLife", "Restarts", "out_of_memory_kills"]

MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
MAX_FAILURES = 8
"""Lives in a row that failed after which the run ends."""
_MAX_CODE_FAILURES = 3
"""Lives in a row in which an environment's own code failed every group, after which the run ends: code does not change
by itself, and each of them costs what was generated for it."""
_STEADY_S = 600.0
"""Seconds in which a process that was up must run out of memory for it to count: what takes longer gets work done."""


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """One life of a process. `ready`: in this one; `starved`: the kernel killed something for lack of memory in it;
    `worked`: it has stored results."""

    code: int
    seconds: float
    ready: bool
    starved: bool = False
    worked: bool = False

    @property
    def killed(self) -> bool:
        """By SIGKILL, whoever sent it."""
        return self.code == -signal.SIGKILL

    def __str__(self) -> str:
        how = f"ended with code {self.code}"
        if self.code == EXIT_NO_ROOM:
            return f"{how} (a disk is full)"
        if self.code == EXIT_OWN_CODE:
            return f"{how} (group after group failed)"
        if self.killed and self.starved:
            return f"{how} (killed by the kernel, which was out of memory)"
        if self.code == EXIT_FENCED and not self.ready:
            return f"{how} (another process has its place: its last life, if that still drains)"
        return f"{how} (killed from outside)" if self.killed and self.ready else how


class Restarts:
    """What one process's lives so far say about the next."""

    def __init__(self) -> None:
        self.failures = 0
        self._was_ready = False
        self._pause_s = MIN_PAUSE_S

    def ended(self, life: ProcessLife) -> float | None:
        """Take in a life; return how long to wait before the next, seconds, or None to give up."""
        self._was_ready |= life.ready
        if life.code == EXIT_NO_ROOM:
            return MAX_PAUSE_S
        if (
            life.code == EXIT_FENCED and not self._was_ready
        ):  # how often is bounded by the time that it has to become ready
            return min(max(MIN_PAUSE_S, life.seconds), MAX_PAUSE_S)  # trying takes half of the time at most
        hopeless = life.code == EXIT_OWN_CODE and not life.worked
        if hopeless:
            self.failures += 1
        elif life.killed and life.starved:
            self.failures = 0 if life.ready and life.seconds > _STEADY_S else self.failures + 1
        elif life.seconds > MAX_PAUSE_S and (life.ready or (self._was_ready and life.code == EXIT_STARTUP)):
            self.failures = 0  # it was up, or waited for a unavailable server
        elif not (life.killed and life.ready):
            self.failures += 1
        if hopeless and self.failures >= _MAX_CODE_FAILURES:
            return None
        # Whoever never became ready and says why will say it again.
        if self.failures >= (2 if life.code == EXIT_STARTUP and not self._was_ready else MAX_FAILURES):
            return None
        pause_s = self._pause_s
        self._pause_s = MIN_PAUSE_S if self.failures <= 1 else min(2 * pause_s, MAX_PAUSE_S)
        return pause_s


def out_of_memory_kills() -> int:
    """Return how many processes this machine's kernel has killed for lack of memory.

    0 where it does not say.
    """
    try:
        counters = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)
