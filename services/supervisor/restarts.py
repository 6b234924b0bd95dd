"""Decides when to restart a process that ended, and when to give up. Pure.

Guarantees that a process which cannot run ends the run instead of being started for ever, and that kills from outside
do not: however many there are, they say nothing about the process. A process that came up and was killed (SIGKILL) was
killed from outside unless the kernel did it for lack of memory, which the kernel counts. One that another process
keeps from its place waits: that is its last life, which drains, where the supervisor before this one was killed. So
does one that met a full disk, and one whose credentials are refused that were taken before: that says nothing about it
either.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from lachesis.services.process.service_process import (
    EXIT_API_KEY,
    EXIT_FENCED,
    EXIT_HISTORY_LOST,
    EXIT_NO_MEMORY,
    EXIT_NO_ROOM,
    EXIT_NOT_PERMITTED,
    EXIT_OWN_CODE,
    EXIT_REFUSED,
    EXIT_SETTINGS_CHANGED,
    EXIT_STARTUP,
)

__all__ = ["MAX_FAILURES", "ProcessLife", "Restarts", "describe_crash"]

MIN_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
MAX_FAILURES = 8
"""Lives in a row that failed after which the run ends."""
_MAX_CODE_FAILURES = 3
"""Lives in a row in which an environment's own code failed every group, after which the run ends: code does not change
by itself, and each of them costs what was generated for it."""
_MAX_LOST_HISTORY = 3
"""Lives in a row that found history lost, after which the run ends: each has waited until no leader could give
old answers any more, and `lachesis runs recover` needs the run to be over."""
_MAX_UNREADY = 2
"""Lives in a row of a process that never became ready and says why, after which the run ends: it will say it again."""
_CRASHES = {
    -number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
}
"""Exit codes of processes that ended by a fault of their own."""
_REASONS = {
    EXIT_NO_ROOM: "a disk is full",
    EXIT_OWN_CODE: "the code that it runs failed",
    EXIT_HISTORY_LOST: "the streams of the run do not fit each other",
    EXIT_REFUSED: "its credentials are refused",
    EXIT_API_KEY: "the key is refused with which it asks a server",
}
_LASTING_ENDS = {
    EXIT_REFUSED: "has credentials that the server refuses",
    EXIT_API_KEY: "has a key that a server refuses",
    EXIT_NOT_PERMITTED: "lacks a permission at the server",
    EXIT_SETTINGS_CHANGED: "cannot go on",
    EXIT_NO_MEMORY: "ran out of memory",
}
"""Exit codes after which another start would end the same way, and what to say of them."""
_EXCHANGED = frozenset({EXIT_REFUSED, EXIT_API_KEY})
"""Of them those that say nothing lasting about a process that was ready before: its credentials were taken then, so
they are being exchanged, or a person has changed what the server takes."""
_CRASHED_THREAD = "Current thread "
_FATAL = "Fatal Python error: "
_STEADY_S = 600.0
"""Seconds in which a process that was up must run out of memory for it to count: what takes longer gets work done."""


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """One life of a process. `ready`: in this one; `starved`: as it ended, the kernel killed for lack of memory;
    `worked`: it has stored results; `noted`: it said itself that it ends with this code; `hung`: why its supervisor
    killed it."""

    code: int
    seconds: float
    ready: bool
    starved: bool = False
    worked: bool = False
    noted: bool = True
    hung: str = ""

    @property
    def meaning(self) -> int | None:
        """The code, if it is the process's own."""
        return self.code if self.noted else None

    @property
    def killed(self) -> bool:
        """By SIGKILL, from any sender."""
        return self.code == -signal.SIGKILL

    def __str__(self) -> str:
        if self.hung:
            return f"was killed because it hung, {self.hung}"
        how = f"ended with code {self.code}"
        reason = _REASONS.get(self.meaning) if self.meaning is not None else None
        if self.meaning == EXIT_FENCED and not self.ready:
            reason = "another process has its place: its last life, if that still drains"
        elif self.killed and self.starved:
            reason = "killed by the kernel, which was out of memory"
        elif self.killed and self.ready:
            reason = "killed from outside"
        elif self.code in _CRASHES:
            reason = f"code that it runs crashed it by {signal.Signals(-self.code).name}"
        elif self.code >= 0 and not self.noted:
            reason = "it gave no reason, so code that it runs has ended it, by os._exit or exec"
        return f"{how} ({reason})" if reason else how


class Restarts:
    """What one process's lives so far say about the next."""

    def __init__(self) -> None:
        self.failures = 0
        self._repeated_end: int | None = None
        self._repeats = 0
        """How many of the last failures, one after the other, ended like the last one (`_repeats_limit`)."""
        self._was_ready = False
        self._pause_s = MIN_PAUSE_S

    def why_last(self, life: ProcessLife) -> str | None:
        """Return what to say of a life after which every other would end the same way.

        None: the next one may differ.
        """
        if life.meaning is None or (life.meaning in _EXCHANGED and (self._was_ready or life.ready)):
            return None
        return _LASTING_ENDS.get(life.meaning)

    def ended(self, life: ProcessLife) -> float | None:
        """Take in a life; return how long to wait before the next, seconds, or None to give up."""
        self._was_ready |= life.ready
        if life.meaning == EXIT_NO_ROOM or (life.meaning in _EXCHANGED and self._was_ready):
            return MAX_PAUSE_S
        if (
            life.meaning == EXIT_FENCED and not self._was_ready
        ):  # how often is bounded by the time that it has to become ready
            return min(max(MIN_PAUSE_S, life.seconds), MAX_PAUSE_S)  # trying takes half of the time at most
        limit = self._repeats_limit(life)
        if limit is not None and life.meaning != EXIT_STARTUP:
            self._count_failure(life)
        elif life.killed and life.starved:
            if life.ready and life.seconds > _STEADY_S:
                self._forget_failures()
            else:
                self._count_failure(life)
        elif life.seconds > MAX_PAUSE_S and (life.ready or (self._was_ready and life.meaning == EXIT_STARTUP)):
            self._forget_failures()  # it was up, or waited for an unavailable server
        elif not (life.killed and life.ready):
            self._count_failure(life)
        if self.failures >= MAX_FAILURES or (limit is not None and self._repeats >= limit):
            return None
        pause_s = self._pause_s
        self._pause_s = MIN_PAUSE_S if self.failures <= 1 else min(2 * pause_s, MAX_PAUSE_S)
        return pause_s

    def _repeats_limit(self, life: ProcessLife) -> int | None:
        """Return after how many such lives in a row the run ends, if that is fewer than `MAX_FAILURES`."""
        if life.meaning == EXIT_OWN_CODE and not life.worked:
            return _MAX_CODE_FAILURES
        if life.meaning == EXIT_HISTORY_LOST:
            return _MAX_LOST_HISTORY if self._was_ready else _MAX_UNREADY
        if life.meaning == EXIT_STARTUP and not self._was_ready:
            return _MAX_UNREADY
        return None

    def _count_failure(self, life: ProcessLife) -> None:
        kind = None if self._repeats_limit(life) is None else life.meaning
        self._repeats = self._repeats + 1 if kind == self._repeated_end else 1
        self._repeated_end = kind
        self.failures += 1

    def _forget_failures(self) -> None:
        self.failures = self._repeats = 0


def describe_crash(lines: Sequence[str]) -> str | None:
    """Return what a process's log says of a crash, with its place; None: there is none."""
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_FATAL)), None)
    if at is None:
        return None
    begin = next((i for i in range(at, len(lines)) if lines[i].startswith(_CRASHED_THREAD)), at)
    frames = [line.strip() for line in lines[begin:] if line.startswith("  File ")]
    place = next((line for line in frames if "/lib/python" not in line), next(iter(frames), ""))
    return f"{lines[at].removeprefix(_FATAL)}{' at ' if place else ''}{place}"
