"""Notices code that holds the Python interpreter itself, and names the line.

One regular expression, one operation on large arrays or one hash of much data may run for long without giving the
interpreter back: then no thread of the process runs, so nothing in Python can say anything. A thread of the C library
writes down where each thread stands (`faulthandler`). Guarantees that this happens only if the interpreter is held for
about `HOLD_S`, that the process names the line once it can, and that `held_place` lets another process read it at once.
If a signal stopped the whole process, or other processes took all processors, no code is named.

That thread reads the others' stacks without the interpreter. If that is not held, but the process got no processor, or
no memory, for as long, the others may run meanwhile, and such a read may crash the process. So nothing is read for
`_CALM_S` after the machine was short of either: a crowded one gives less and less before it gives nothing.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from lachesis.pipeline.common.code_place import holding_place
from lachesis.pipeline.common.ticks import seconds_to_tick
from lachesis.pipeline.notices.silence import HELD_CURE
from lachesis.pipeline.runtime.process_note import ProcessNote, read_note
from lachesis.pipeline.runtime.slow_code import SlowCode

__all__ = ["HOLD_S", "INTERPRETER_HOLDS", "InterpreterHolds", "held_place"]

HOLD_S: Final = 1.5
"""Seconds for which no thread gets the interpreter, from which on it counts as held."""
_ARM_S = 1.0
_CALM_S = 10.0
_SHORT_S = 0.25
"""Seconds that a tick comes late, or threads wait for a processor between two, from which on the machine is short."""
_LATE_S = 0.5
"""Seconds after the timer's end at which its thread must have written: one that is later did not run itself."""
_NOTE = "held"
_TIMES = ("/proc/self/schedstat", "/proc/thread-self/schedstat")
"""Of the main thread, and of the one that reads."""
_MAX_TIMES_BYTES = 128


class InterpreterHolds:
    """The holds of this process."""

    def __init__(self) -> None:
        self._note: ProcessNote | None = None
        self._armed_s = 0.0
        self._armed_ns = 0
        self._delayed_ns = 0
        self._short_s = float("-inf")
        """When the machine was last short of processors or memory."""
        self._ended_s = float("-inf")
        self._slow = SlowCode("Python itself", HELD_CURE)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the interpreter from a thread, until the context ends."""
        self._note, ended = ProcessNote(_NOTE), threading.Event()
        self._arm(self._note)  # before anything can hold the interpreter
        thread = threading.Thread(target=self._watch, args=(self._note, ended), name="watches Python", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()
            self._note.close()
            self._note = None

    def _watch(self, note: ProcessNote, ended: threading.Event) -> None:
        while not ended.wait(seconds_to_tick(_ARM_S)):
            armed_s, armed_ns, delayed_ns = self._armed_s, self._armed_ns, self._delayed_ns
            if self._is_overdue():
                self._ended_s = time.monotonic()
            self._look_for_shortage(armed_s, delayed_ns, was_held=note.size > 0)
            self._arm(note)
            if note.size:
                self._record(note, armed_s, armed_ns, (self._delayed_ns - delayed_ns) / 1e9)

    def _look_for_shortage(self, armed_s: float, delayed_ns: int, *, was_held: bool) -> None:
        """Note whether the process got too little of the machine since the last tick."""
        now_s, delayed_s = time.monotonic(), (_delayed_ns() - delayed_ns) / 1e9
        is_late = now_s - armed_s > _ARM_S + _SHORT_S and not was_held
        if is_late or delayed_s > _SHORT_S:
            self._short_s = now_s

    def _arm(self, note: ProcessNote) -> None:
        """Restart the timer in one call: between two calls another thread could take the interpreter.

        After a shortage it is stopped.
        """
        self._armed_s, self._armed_ns, self._delayed_ns = time.monotonic(), time.time_ns(), _delayed_ns()
        if self._armed_s - self._short_s < _CALM_S:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(HOLD_S, file=note.fd)

    def _record(self, note: ProcessNote, armed_s: float, armed_ns: int, delayed_s: float = 0.0) -> None:
        """Take in that the timer has ended, and for how long threads waited for a processor meanwhile."""
        self._ended_s = time.monotonic()
        late_s = (note.written_ns - armed_ns) / 1e9 - HOLD_S
        place = holding_place(note.read().decode(errors="replace"))
        note.write(b"")
        took_s = self._ended_s - armed_s
        if place is not None and late_s < _LATE_S and took_s - delayed_s >= HOLD_S:
            self._slow.record(place, self._ended_s, took_s)

    def was_held_since(self, began_s: float) -> bool:
        """Return whether the interpreter was held, or the process stopped, after `began_s`."""
        note = self._note
        return note is not None and (note.size > 0 or self._ended_s >= began_s or self._is_overdue())

    def _is_overdue(self) -> bool:
        """Return whether the watching thread should have run again long ago."""
        return time.monotonic() - self._armed_s > _ARM_S + HOLD_S

    def describe(self) -> str | None:
        """Return what to say of holds within the last minute; None: there were none."""
        return self._slow.describe(time.monotonic())


def _delayed_ns() -> int:
    """Return for how long the main thread and this one have been ready to run and had no processor, ns.

    0 where the system does not say.
    """
    try:
        return sum(int(_read(file).split()[1]) for file in _TIMES)
    except (OSError, IndexError, ValueError):
        return 0


def _read(file: str) -> bytes:
    """Return the beginning of a file without Python's own layers: they cost more than all else that the watch does."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, _MAX_TIMES_BYTES)
    finally:
        os.close(descriptor)


INTERPRETER_HOLDS: Final = InterpreterHolds()
"""Of this process, which has one interpreter."""


def held_place(pid: int) -> str | None:
    """Return where code of a process of this machine holds its interpreter now.

    None: none does, or that is not known.
    """
    dump = read_note(pid, _NOTE)
    return holding_place(dump.decode(errors="replace")) if dump else None
