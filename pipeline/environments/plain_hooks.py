"""Calls the plain hooks of environments on the event loop, and names those that hold it.

While a plain function runs, nothing else of its process does. It is not moved to a thread: there signals fail, by which
libraries of mathematics bound their time, and a function that catches this would give another reward. Guarantees that
after each call that takes long, the loop serves what waits, heartbeats and leases say, before the next call begins.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio

__all__ = ["HOOKS", "HOOK_CURE", "HeldLoop", "HookTimes"]

log = logging.getLogger("lachesis")

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
_REMEMBERED_S = 60.0


@dataclass(frozen=True, slots=True)
class HeldLoop:
    """The function that holds the event loop, and since when by the clock of `HookTimes`."""

    name: str
    since_s: float


@dataclass(slots=True)
class _SlowHook:
    ended_s: float
    calls: int = 0
    longest_s: float = 0.0


class HookTimes:
    """The slow hooks of this process, by class and function."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = -1.0
        self._slow: dict[str, _SlowHook] = {}
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
        """Note how long the body holds the event loop."""
        began_s = self._clock()
        before, self.held = self.held, HeldLoop(name, began_s)
        try:
            yield
        finally:
            self.held = before
            if before is None:
                self._record(name, began_s, self._clock())

    @contextmanager
    def move_on_after(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """As anyio's, for time in which the loop is not held: what waits meanwhile has no part in it."""
        with anyio.move_on_after(seconds) as scope:
            self._scopes.add(scope)
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    @contextmanager
    def fail_after(self, seconds: float) -> Iterator[None]:
        """As anyio's, which raises `TimeoutError`, for time in which the loop is not held."""
        with self.move_on_after(seconds) as scope:
            yield
        if scope.cancelled_caught:
            raise TimeoutError

    async def sleep(self, seconds: float) -> None:
        """Wait so long, not counting time in which the loop is held."""
        with self.move_on_after(seconds):
            await anyio.sleep_forever()

    def _record(self, name: str, began_s: float, ended_s: float) -> None:
        took_s = ended_s - began_s
        if took_s < _LONG_S:
            return
        self._next_s = ended_s + min(_MAX_PAUSE_S, max(_PAUSE_S, _PAUSE_SHARE * took_s))
        self.held_s += took_s
        for scope in self._scopes:
            scope.deadline += took_s
        if took_s < _SLOW_S:
            return
        one = self._slow.get(name)
        if one is None:
            log.warning("%s held the event loop for %.1f s, in which nothing else ran: %s", name, took_s, HOOK_CURE)
        if one is None or ended_s - one.ended_s > _REMEMBERED_S:
            one = self._slow[name] = _SlowHook(ended_s)
        one.ended_s, one.calls, one.longest_s = ended_s, one.calls + 1, max(one.longest_s, took_s)

    def describe(self, owner: str) -> str | None:
        """Return what to say of slow hooks of the class `owner` within the last minute; None: there were none."""
        now_s = self._clock()
        found = [
            f"{name} takes up to {one.longest_s:.1f} s"
            for name, one in self._slow.items()
            if name.rpartition(".")[0] == owner and now_s - one.ended_s <= _REMEMBERED_S
        ]
        return f"{', '.join(found)}, in which nothing else of its process runs" if found else None


HOOKS: Final = HookTimes()
"""Of this process, which has one event loop."""
