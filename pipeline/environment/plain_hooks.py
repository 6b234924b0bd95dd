"""Calls the plain hooks of environments on the event loop, and names those that hold it.

While a plain function runs, nothing else in its process does. It is not moved to a thread: signals, with which
mathematical libraries limit their time, fail there, and a function that catches that error would give another reward.
Guarantees that after each long call the loop serves waiting tasks, such as heartbeats and leases, before the next call
begins.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import anyio

from lachesis.pipeline.runtime.blocked_interpreter import INTERPRETER_HOLDS
from lachesis.pipeline.runtime.blocked_loop import HeldLoop
from lachesis.pipeline.runtime.slow_code import SlowCode

__all__ = ["HOOKS", "HOOK_CURE", "HookTimes"]

HOOK_CURE: Final = (
    "make it `async def` with `await anyio.to_thread.run_sync(...)` around what takes long, or judge by a rater"
)
_LONG_S = 0.1
"""Seconds from which on other tasks come before the next call."""
_PAUSE_S = 0.05
"""Seconds that they have: a heartbeat or a renewal takes some rounds of the loop,"""
_PAUSE_SHARE = 0.05
"""and after a long call more of them, since more has come up meanwhile: this share of the call,"""
_MAX_PAUSE_S = 1.0
"""but no more than these seconds."""
_SLOW_S = 1.0
"""Seconds from which on a call is named."""


class HookTimes:
    """The slow hooks of this process, by class and function."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = -1.0
        self._recorded_until_s = float("-inf")
        self._slow = SlowCode("the event loop", HOOK_CURE)
        self._scopes: set[anyio.CancelScope] = set()
        self.held: HeldLoop | None = None
        """What holds the loop now. Other threads may read it."""
        self.held_s = 0.0
        """Seconds for which slow functions have held the loop in all."""

    async def call(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Call an environment's method with `args`, on this thread. An awaitable is returned as it is."""
        while (pause_s := self._next_s - self._clock()) > 0:  # noqa: ASYNC110 - until no slow call came before
            await anyio.sleep(pause_s)
        owner = type(getattr(hook, "__self__", hook)).__name__
        with self.timed(f"{owner}.{getattr(hook, '__name__', 'hook')}"):
            return hook(*args)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record how long the body holds the event loop."""
        began_s = self._clock()
        before, self.held = self.held, HeldLoop(name, began_s, HOOK_CURE)
        try:
            yield
        finally:
            self.held = before
            if before is None:
                self.record(name, began_s, self._clock())

    @contextmanager
    def move_on_after(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Like anyio's, but time in which the loop is held does not count."""
        with anyio.move_on_after(seconds) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    @contextmanager
    def fail_after(self, seconds: float) -> Iterator[None]:
        """Like anyio's, which raises `TimeoutError`, but time in which the loop is held does not count."""
        with self.move_on_after(seconds) as scope:
            yield
        if scope.cancelled_caught:
            raise TimeoutError

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, not counting time in which the loop is held."""
        with self.move_on_after(seconds):
            await anyio.sleep_forever()

    def record(self, name: str | None, began_s: float, ended_s: float) -> None:
        """Record that the code called `name` held the event loop.

        None: the code is not known, or the process was stopped.
        """
        began_s = max(began_s, self._recorded_until_s)
        self._recorded_until_s, took_s = ended_s, ended_s - began_s
        if took_s < _LONG_S:
            return
        self._next_s = ended_s + min(_MAX_PAUSE_S, max(_PAUSE_S, _PAUSE_SHARE * took_s))
        self.held_s += took_s
        for scope in self._scopes:
            scope.deadline += took_s
        if (
            name is not None and took_s >= _SLOW_S and not INTERPRETER_HOLDS.was_held_since(began_s)
        ):  # which is named with its line
            self._slow.record(name, ended_s, took_s)

    def describe(self) -> str | None:
        """Return what to say of slow hooks within the last minute; None: there were none."""
        return self._slow.describe(self._clock())


HOOKS: Final = HookTimes()
"""Of this process, which has one event loop."""
