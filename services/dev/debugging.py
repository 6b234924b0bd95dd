"""An event loop for breakpoints: its time stands still while somebody is at one.

While a user stands at a breakpoint, in whichever thread, no time limit runs out and nothing is delivered again: the
loop's clock stands. A prompt of pdb and of what builds on it is seen by its frames; a debugger that suspends all
threads, as those of IDEs do, by the time that the watching thread itself did not run.

A call of a user's function that does not return holds up everything. It is printed, with its stack, after `_SAY_S`
seconds, and ends the process after `max_call_s`. Loading an environment or a rater may take longer.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import FrameType
from typing import NoReturn

import anyio
import anyio.to_thread

from lachesis.pipeline.environment.load import load_environment
from lachesis.pipeline.scorer.loader import load_member
from lachesis.services.dev.tracebacks import abandoned_calls, call_under_way, print_failures, stack_of

__all__ = ["PausedClock", "run_for_breakpoints"]

_LOOK_S = 0.05
"""How often the threads are looked at."""
_MAX_GAP_S = 1.0
"""The longest time between two looks that counts as time; beyond it the whole process was suspended."""
_PROMPTS = {"bdb": "dispatch_", "cmd": "cmdloop", "code": "interact"}
"""By module, how the functions begin in which a thread is that asks somebody what to do."""
_SAY_S = 10.0
"""Seconds after which a call that holds up the loop is printed."""
_MAX_CALL_S = 60.0
_LOADING = {load_environment.__code__, load_member.__code__}


class PausedClock:
    """The time in seconds, without that in which somebody stood at a breakpoint. It never goes back."""

    def __init__(self, now_s: float) -> None:
        self._seen_s = now_s
        self._stood_s = 0.0
        self._stands = False
        self._lock = threading.Lock()

    def read(self, now_s: float) -> float:
        """Return the clock's time at `now_s`, of a clock that never stands."""
        with self._lock:
            until_s = self._seen_s if self._stands else min(now_s, self._seen_s + _MAX_GAP_S)
            return max(until_s, self._seen_s) - self._stood_s

    def record(self, now_s: float, *, stands: bool) -> None:
        """Record whether the process stands at a breakpoint at `now_s`."""
        with self._lock:
            gap_s = now_s - self._seen_s
            self._stood_s += gap_s if self._stands else max(0.0, gap_s - _MAX_GAP_S)
            self._seen_s, self._stands = now_s, stands


class _Loop(asyncio.SelectorEventLoop):
    """An event loop on a clock that can stand. `turns` counts how often it read the time."""

    def __init__(self, clock: PausedClock) -> None:
        self._paused_clock = clock
        self.turns = 0
        super().__init__()

    def time(self) -> float:
        self.turns += 1
        return self._paused_clock.read(time.monotonic())


class _Watch(threading.Thread):
    """Looks at what the threads do: keeps the clock, and ends the process when a call never returns."""

    def __init__(self, clock: PausedClock, max_call_s: float) -> None:
        super().__init__(name="lachesis-dev-watch", daemon=True)
        self.loop: _Loop | None = None
        self._clock = clock
        self._max_call_s = max_call_s
        self._ended = threading.Event()
        self._call: FrameType | None = None
        self._turns = 0
        self._held_s = 0.0  # for so long the call has held up the loop
        self._said = False

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            frames = sys._current_frames()  # noqa: SLF001 - the only way to another thread's stack
            stands = any(map(_is_at_prompt, frames.values()))
            self._clock.record(time.monotonic(), stands=stands)
            self._look_at_call(None if stands else frames.get(threading.main_thread().ident or 0))

    def _look_at_call(self, frame: FrameType | None) -> None:
        call = call_under_way(frame)
        turns = self.loop.turns if self.loop is not None else 0
        if call is None or frame is None or call is not self._call or turns != self._turns:
            self._call, self._turns, self._held_s, self._said = call, turns, 0.0, False
            return
        self._held_s += _LOOK_S
        ends = self._held_s >= self._max_call_s and not _is_loading(frame)
        if ends or (self._held_s >= _SAY_S and not self._said):
            self._said = True
            stack = stack_of(call, frame).rstrip()
            _say(f"this call has not returned for {self._held_s:.0f} s, and everything waits for it:\n{stack}")
        if ends:
            _say("gave it up: in a service it would stop everything. Make the function `async`, or let it raise")
            _end_process(1)


def _is_at_prompt(frame: FrameType) -> bool:
    for one in _stack(frame):
        beginning = _PROMPTS.get(str(one.f_globals.get("__name__")))
        if beginning is not None and one.f_code.co_name.startswith(beginning):
            return True
    return False


def _is_loading(frame: FrameType) -> bool:
    return any(one.f_code in _LOADING for one in _stack(frame))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def run_for_breakpoints(main: Callable[[], Awaitable[bool]], *, max_call_s: float = _MAX_CALL_S) -> int:
    """Run `main` on this thread, with the tracebacks of a user's code printed, and return the exit code.

    0: it returned true. 1: false. Ctrl-C, or quitting the debugger, ends the process at once with 130. So does the end
    of `main`, with its code, where a call in a worker thread has not returned, which is shown.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    print_failures(_stop)
    clock = PausedClock(time.monotonic())
    watch = _Watch(clock, max_call_s)

    def make_loop() -> _Loop:
        watch.loop = _Loop(clock)
        return watch.loop

    async def run() -> bool:
        # tools that are plain functions share these threads: two breakpoints would ask for input at once
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        return await main()

    before = signal.signal(signal.SIGINT, _interrupt)  # the loop's own would wait for the user's code to return
    watch.start()
    try:
        code = 0 if anyio.run(run, backend_options={"loop_factory": make_loop}) else 1
    except KeyboardInterrupt:
        _stop()  # wherever it came, the loop's tasks and threads are in the middle of something
    except Exception:
        stacks = abandoned_calls()
        if not stacks:
            raise
        traceback.print_exc()
        _end_without(stacks, 1)
    finally:
        watch.end()
        signal.signal(signal.SIGINT, before)
    stacks = abandoned_calls()
    if stacks:
        _end_without(stacks, code)
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _stop() -> NoReturn:
    _say("stopped")
    _end_process(130)


def _end_without(stacks: Sequence[str], code: int) -> NoReturn:
    """End the process, which would wait for these calls."""
    for stack in stacks:
        _say(f"this call has not returned; the process ends without it:\n{stack.rstrip()}")
    _end_process(code)


def _say(text: str) -> None:
    print(f"lachesis: {text}", file=sys.stderr, flush=True)


def _end_process(code: int) -> NoReturn:
    """End the process without its threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
