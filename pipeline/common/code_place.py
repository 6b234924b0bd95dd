"""Names the line of somebody's code at which a thread stands, by its stack. Pure.

Guarantees the innermost line that is neither Python's own library, nor an installed package, nor this project's: that
is the one which its author can change. Where there is none, the innermost one of these.
"""

import re
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

__all__ = [
    "StackLine",
    "holding_place",
    "is_idle_loop",
    "is_own_code",
    "own_line",
    "place_of",
    "stack_of",
    "stack_of_error",
]

_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen ")
_INSTALLED = re.compile(r"/(site|dist)-packages/")
_OURS = re.compile(
    rf"^{re.escape(str(Path(__file__).resolve().parents[1]))}/|/lachesis/(pipeline|schemas|services|__main__\.py)"
)
_WAITING = frozenset(
    {"threading.py", "selectors.py", "queue.py", "connection.py", "thread.py", "subprocess.py", "socket.py", "ssl.py"}
)
"""Files of Python's library in whose calls a thread waits, without the interpreter."""
_MAX_CHARS = 160
_MAX_PLACES = 3
"""Threads that are named where more than one is in somebody's own code."""


class StackLine(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}, line {self.line})"[:_MAX_CHARS]


def stack_of(frame: FrameType | None) -> list[StackLine]:
    """Return the stack of a frame, the innermost line first."""
    found = []
    while frame is not None:
        found.append(StackLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return found


def stack_of_error(error: BaseException) -> list[StackLine]:
    """Return the stack in which an error was raised, as far as it has gone, the innermost line first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return [StackLine(frame.filename, frame.lineno or 0, frame.name) for frame in frames]


def is_idle_loop(stack: Sequence[StackLine]) -> bool:
    """Return whether this is an event loop that waits for something to do."""
    return [Path(line.file).name for line in stack[:2]] == ["selectors.py", "base_events.py"]


def is_own_code(stack: Sequence[StackLine]) -> bool:
    """Return whether somebody's own code is under way, not only that of libraries and this project."""
    return own_line(stack) is not None


def place_of(stack: Sequence[StackLine]) -> str:
    """Return where the code of a stack stands, which is not empty."""
    own = own_line(stack)
    if own is None:
        others = [line for line in stack if not _is_standard(line)]
        return str(next((line for line in others if not _OURS.search(line.file)), next(iter(others), stack[0])))
    first = own_line(stack[::-1])
    return str(own) if first is None or first == own else f"{own} of {first.function}"


def holding_place(dump: str) -> str | None:
    """Return where the code stands that held the interpreter when `faulthandler` wrote `dump`.

    None: it does not say. That is a thread that waits for nothing: one in somebody's own code, else the main thread,
    which is written last. A line that is still being written counts for nothing.
    """
    busy = [stack for stack in _stacks(dump.split("\n")[:-1]) if not _is_waiting(stack)]
    own = [stack for stack in reversed(busy) if own_line(stack) is not None]
    return " or ".join(dict.fromkeys(map(place_of, own[:_MAX_PLACES] or busy[-1:]))) or None


def _is_waiting(stack: Sequence[StackLine]) -> bool:
    """Return whether a thread waits, without the interpreter.

    This project's own threads wait in the function that they begin with, and work in those that it calls.
    """
    inner, *outer = stack
    begins_here = bool(outer) and "threading" in Path(outer[0].file).name
    return Path(inner.file).name in _WAITING or (begins_here and _OURS.search(inner.file) is not None)


def own_line(stack: Sequence[StackLine]) -> StackLine | None:
    """Return the innermost line that is neither of a library nor of this project."""
    return next(
        (line for line in stack if not (_is_standard(line) or _INSTALLED.search(line.file) or _OURS.search(line.file))),
        None,
    )


def _is_standard(line: StackLine) -> bool:
    return line.file.startswith(_STANDARD) and not _INSTALLED.search(line.file)


def _stacks(lines: Iterable[str]) -> list[list[StackLine]]:
    found: list[list[StackLine]] = [[]]
    for text in lines:
        if text.startswith(("Thread ", "Current thread ")):
            found.append([])
        elif (match := _LINE.match(text)) is not None:
            found[-1].append(StackLine(match["file"], int(match["line"]), match["function"]))
    return [stack for stack in found if stack]
