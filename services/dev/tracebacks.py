"""Prints what a user's code raises: its traceback from the user's first frame on, each place once."""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import tenacity

import lachesis
from lachesis.pipeline.common.user_code import FAILURE_LOG

__all__ = ["abandoned_calls", "awaited_calls", "call_under_way", "print_failures", "stack_of", "user_traceback"]

_PACKAGE = f"{Path(lachesis.__file__).parent}{os.sep}"
_CALLERS = tuple(
    f"{_PACKAGE}pipeline{os.sep}{folder}{os.sep}" for folder in ("environment", "evaluator", "normalizer", "scorer")
)
"""Folders of what calls a user's code."""
_WORKER = "AnyIO worker thread"
"""Name of the threads in which stages call plain functions."""
_END_S = 1.0
"""How long worker threads have to end once they get no more work; idle ones do at once."""
_OURS = (_PACKAGE, *(f"{Path(str(library.__file__)).parent}{os.sep}" for library in (anyio, tenacity)))
"""Folders of this package, and of the libraries that run its tasks and its retries."""


def user_traceback(error: BaseException) -> str:
    """Return the traceback of an exception, and of those behind it, from the user's first frame on."""
    whole = traceback.TracebackException.from_exception(error)
    one: traceback.TracebackException | None = whole
    while one is not None:
        one.stack = traceback.StackSummary.from_list(_from_user(one.stack) or one.stack)
        one = one.__cause__ or one.__context__
    return "".join(whole.format())


def _from_user(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    first = next((i for i, frame in enumerate(frames) if not frame.filename.startswith(_OURS)), len(frames))
    return frames[first:]


def call_under_way(frame: FrameType | None) -> FrameType | None:
    """Return the user's function that a thread is in, by its innermost frame: the one that a stage called.

    None: the thread is in this package, or waits, or a library works for this package, as torch does.
    """
    found = None
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        found, frame = frame, frame.f_back
    return found if frame is not None and frame.f_code.co_filename.startswith(_CALLERS) else None


def stack_of(call: FrameType | None, frame: FrameType) -> str:
    """Return the stack of a thread from `call` (None: from its beginning) to its innermost frame."""
    depth, one = 1, frame
    while one is not call and one.f_back is not None:
        depth, one = depth + 1, one.f_back
    return "".join(traceback.format_list(traceback.extract_stack(frame)[-depth:]))


def abandoned_calls() -> list[str]:
    """Return the stack of each thread of the event loop's that does not end although the loop has.

    Python cannot stop it, and would wait for it.
    """
    workers = [one for one in threading.enumerate() if one.name == _WORKER]
    until_s = time.monotonic() + _END_S
    for worker in workers:
        worker.join(max(0.0, until_s - time.monotonic()))
    frames = sys._current_frames()  # noqa: SLF001 - the only way to another thread's stack
    left = [frames[one.ident] for one in workers if one.is_alive() and one.ident in frames]
    return [stack_of(call_under_way(frame), frame) for frame in left]


def awaited_calls() -> list[str]:
    """Return the stack of each call of a user's `async` code that waits for something, each once."""
    stacks: dict[str, None] = {}
    for task in asyncio.all_tasks():
        frames: list[tuple[FrameType, int]] = []
        waits: Any = task.get_coro()
        while waits is not None:
            frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
            if frame is not None:
                frames.append((frame, frame.f_lineno))
            waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
        stack = traceback.StackSummary.extract(iter(frames))
        first = len(stack) - len(_from_user(stack))
        if first and stack[first - 1].filename.startswith(_CALLERS):
            theirs = takewhile(lambda one: not one.filename.startswith(_OURS), stack[first:])
            stacks["".join(traceback.format_list(list(theirs)))] = None
    return list(stacks)


class _Tracebacks(logging.Handler):
    def __init__(self, on_quit: Callable[[], None]) -> None:
        super().__init__(logging.DEBUG)
        self._on_quit = on_quit
        self._printed: set[tuple[type[BaseException], str]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, BdbQuit):
            self._on_quit()
        frames = _from_user(traceback.extract_tb(error.__traceback__)) if error is not None else ()
        if error is None or not frames:  # not the user's: what is reported of it says it all
            return
        place = type(error), "".join(traceback.format_list(frames))
        if place not in self._printed:
            self._printed.add(place)
            print(f"{record.getMessage()}:\n{user_traceback(error)}", end="", file=sys.stderr, flush=True)


def print_failures(on_quit: Callable[[], None]) -> None:
    """From now on print the tracebacks of whatever a user's code raises, to standard error.

    `on_quit` is called when somebody quits a debugger, which raises in the code that it stands in.
    """
    FAILURE_LOG.addHandler(_Tracebacks(on_quit))
    FAILURE_LOG.setLevel(logging.DEBUG)
    FAILURE_LOG.propagate = False
