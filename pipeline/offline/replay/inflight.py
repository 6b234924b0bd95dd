"""Holds rollouts between reading and folding: bounded in number and bytes, paced, and in order.

Guarantees that `fold` is called once for each rollout that was begun and settled, in the order in which they were
begun, whatever the order in which they are settled.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from lachesis.pipeline.bus.window import InFlightWindow
from lachesis.pipeline.offline.replay.pace import ReplayPace
from lachesis.pipeline.offline.replay.scoring import ScoreOrReason
from lachesis.pipeline.offline.replay.selected import SelectedRollout

__all__ = ["MAX_IN_FLIGHT_BYTES", "BlockSize", "CooperativeYield", "InFlight", "InFlightRollout"]

MAX_IN_FLIGHT_BYTES = 64 << 20
"""What rollouts in flight may weigh in one process, bytes; a larger one goes alone."""
_TURN_S = 0.005
"""Seconds that rollouts which wait for nothing have before all else in the process has its turn."""
_BLOCK_S = 0.2
"""Seconds that a worker takes to score one block, about."""
_FIRST_BLOCK = 16
_GROWTH = 4


class CooperativeYield:
    """Yields to other tasks every few milliseconds during work that awaits nothing."""

    def __init__(self) -> None:
        self._had_turn = 0.0

    async def give(self) -> None:
        if time.monotonic() - self._had_turn >= _TURN_S:
            await anyio.lowlevel.checkpoint()
            self._had_turn = time.monotonic()


class BlockSize:
    """Adapts how many rollouts are sent to a worker at once.

    Where raters have to be waited for, as many as the pace allows. Otherwise two blocks at a time for each worker, each
    of what one scores within a fraction of a second: a pause waits for them, and a kill repeats them.
    """

    def __init__(self, pace: ReplayPace, *, waits: bool) -> None:
        self._most = pace.block(waits=waits)
        self._waits = waits
        self._size = self._most if waits else min(_FIRST_BLOCK, self._most)
        self._room = anyio.Semaphore(2 * pace.workers)

    async def begin(self) -> int:
        """Return how many rollouts the next block may have, once it may be requested."""
        if not self._waits:
            await self._room.acquire()
        return self._size

    def answered(self, groups: int, seconds: float) -> None:
        """Say that a block of so many groups was scored in so many seconds."""
        if not self._waits:
            fitting = self._most if seconds <= 0 else int(_BLOCK_S * groups / seconds)
            self._size = max(1, min(fitting, self._most, _GROWTH * self._size))
            self._room.release()


@dataclass(slots=True, eq=False)
class InFlightRollout:
    """A rollout in flight, of `size` bytes as far as it is held here."""

    found: SelectedRollout
    size: int
    verdict: ScoreOrReason | None = None


class InFlight:
    """See the module's docstring. At most `most` rollouts. Once `draining`, nothing is begun any more."""

    def __init__(
        self,
        most: int,
        max_rate: float | None,
        draining: anyio.Event,
        fold: Callable[[SelectedRollout, ScoreOrReason], None],
    ) -> None:
        self._max_rate = max_rate
        self._draining = draining
        self._fold = fold
        self._window = InFlightWindow(MAX_IN_FLIGHT_BYTES, most)
        self._slots: deque[InFlightRollout] = deque()
        self._due = 0.0
        self._turns = CooperativeYield()

    async def begin(self, found: SelectedRollout, size: int) -> InFlightRollout | None:
        """Return the slot of the next rollout once there is room and it is its turn; None: it is draining."""
        await self._window.enter(size)
        await self._wait_turn()
        if self._draining.is_set():
            return None
        slot = InFlightRollout(found, size)
        self._slots.append(slot)
        return slot

    def settle_rollout(self, slot: InFlightRollout, verdict: ScoreOrReason) -> None:
        """Take in what became of a rollout; all that waited for nothing else is folded."""
        slot.verdict = verdict
        while self._slots and (known := self._slots[0].verdict) is not None:
            first = self._slots.popleft()
            self._window.release(first.size)
            self._fold(first.found, known)

    async def _wait_turn(self) -> None:
        """Wait until another rollout may begin by `max_rate`, or it drains. Others have their turn in any case."""
        if self._max_rate is None:
            await self._turns.give()
            return
        now = anyio.current_time()
        turn = max(self._due, now)
        self._due = turn + 1 / self._max_rate
        with anyio.move_on_after(turn - now):
            await self._draining.wait()
