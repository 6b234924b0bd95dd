"""Sends heartbeats from a thread for a service whose event loop is held by user code.

The thread has a connection of its own. Guarantees that from `SPEAKS_AFTER_S` seconds on the service's heartbeats go on,
with a notice that names the code, and that its leases are renewed; that this thread says nothing while the loop runs;
and that it falls silent after the service's `held_limit_s`, so that a function which never returns counts as hung. Code
that holds the interpreter itself stops this thread too: see `blocked_interpreter`.
"""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.common.background_tasks import background
from lachesis.pipeline.common.code_place import is_idle_loop, is_own_code, place_of, stack_of
from lachesis.pipeline.common.ticks import seconds_to_tick, sleep_until_tick
from lachesis.pipeline.notices.silence import HELD_CURE
from lachesis.pipeline.runtime.blocked_interpreter import INTERPRETER_HOLDS
from lachesis.pipeline.runtime.slow_code import SlowCode
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.notices import Notice

if TYPE_CHECKING:
    from lachesis.pipeline.runtime.service import Service

__all__ = ["LOOP_CURE", "SPEAKS_AFTER_S", "HeldLoop", "LoopHolders", "speaking_while_held"]

log = logging.getLogger("lachesis")

SPEAKS_AFTER_S: Final = 1.0
LOOP_CURE: Final = "put `await anyio.to_thread.run_sync(...)` around what takes long there"
_SPEAKS_OF_OTHERS_AFTER_S = 4.0
"""The same where only code of this project and of libraries is under way, which a busy machine makes slow."""
_TICK_S = 0.5
_BEAT_S = 0.5
_KEPT_S = 30.0
"""Seconds for which the connection is kept after a function has returned: slow ones come one after the other."""
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class HeldLoop:
    """The code that holds the event loop, since when by `time.monotonic`, and how to change it."""

    name: str
    since_s: float
    cure: str = LOOP_CURE


class LoopHolders(Protocol):
    """Knows code that a service calls on its event loop. Another thread reads `held`."""

    @property
    def held(self) -> HeldLoop | None:
        """Return the code that holds the loop now."""

    def record(self, name: str | None, began_s: float, ended_s: float) -> None:
        """Take in that other code, which it did not call, held the loop; None: it is not known which."""


class _UnknownHolders:
    """Knows none: `record` alone remembers what was seen from outside."""

    def __init__(self) -> None:
        self.held: HeldLoop | None = None
        self.slow = SlowCode("the event loop", LOOP_CURE)

    def record(self, name: str | None, began_s: float, ended_s: float) -> None:
        if name is not None and not INTERPRETER_HOLDS.was_held_since(began_s):
            self.slow.record(name, ended_s, ended_s - began_s)


@asynccontextmanager
async def speaking_while_held(service: "Service") -> AsyncIterator[None]:
    """Speak for `service`, and renew its leases, while code holds its event loop.

    Afterwards the service says which code that was.
    """
    if not isinstance(service.bus, NatsBus):
        yield
        return
    speaker = _Speaker(service, service.bus)
    thread = threading.Thread(target=speaker.run, name="speaks while the loop is held", daemon=True)
    thread.start()
    try:
        async with background() as tasks:
            tasks.start_soon(speaker.tick)
            yield
    finally:
        speaker.ended.set()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join, _TICK_S + _ANSWER_S)


class _Speaker:
    def __init__(self, service: "Service", bus: NatsBus) -> None:
        self.ended = threading.Event()
        self._service = service
        self._connection = bus.connection
        self._unknown = _UnknownHolders()
        self._loop_thread = threading.get_ident()
        self._ticked_s = time.monotonic()
        self._resumed_s = float("-inf")
        """When this thread ran again after a time in which nothing of the process did: a signal had stopped it, say."""
        self._seen: HeldLoop | None = None
        """What held the loop when this thread looked last, where nothing called on the loop says that it does."""

    @property
    def _holders(self) -> LoopHolders:
        return self._service.loop_holders or self._unknown

    async def tick(self) -> None:
        """Note that the loop runs, and what held it before. Runs until cancelled."""
        while True:
            seen, self._seen = self._seen, None
            now_s = time.monotonic()
            if seen is not None or now_s - self._ticked_s >= _TICK_S + SPEAKS_AFTER_S:
                self._holders.record(None if seen is None else seen.name, self._ticked_s, now_s)
            self._ticked_s = now_s
            self._service.set_problem("slow code on the loop", self._unknown.slow.describe(now_s), mend=LOOP_CURE)
            held = INTERPRETER_HOLDS.describe()
            self._service.set_problem("Python held", held, mend=HELD_CURE)
            await sleep_until_tick(_TICK_S)

    def run(self) -> None:
        """Look at the loop until `ended`."""
        looked_s = time.monotonic()
        while not self.ended.wait(seconds_to_tick(_TICK_S)):
            if time.monotonic() - looked_s >= _TICK_S + SPEAKS_AFTER_S:
                self._resumed_s = time.monotonic()
            if self._held() is not None:
                try:
                    asyncio.run(self._speak())
                except (LachesisError, OSError, TimeoutError) as error:
                    log.debug("cannot speak for the held event loop: %s", error)
            looked_s = time.monotonic()

    def _held(self) -> HeldLoop | None:
        """Return what holds the loop long enough to be spoken of, and not too long."""
        beat = self._service.last_beat
        if beat is None or beat.stage.state == "starting":
            return None  # it says what its start is busy with
        ticked_s = self._ticked_s
        held = self._holders.held
        if held is None and time.monotonic() - ticked_s >= SPEAKS_AFTER_S:
            frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - the only way to see another thread
            stack = stack_of(frame)
            after_s = SPEAKS_AFTER_S if is_own_code(stack) else _SPEAKS_OF_OTHERS_AFTER_S
            if is_idle_loop(stack) or time.monotonic() - ticked_s < after_s:
                return None  # other processes take the processors
            held = HeldLoop(place_of(stack), ticked_s)
            if self._ticked_s == ticked_s:  # else it goes on
                self._seen = self._seen or held
        if held is None:
            return None
        held_s = time.monotonic() - max(held.since_s, self._resumed_s)
        return held if SPEAKS_AFTER_S <= held_s <= self._service.held_limit_s else None

    async def _speak(self) -> None:
        config, token = self._connection
        name = f"{self._service.run}.{self._service.name}.held"
        bus = await connect(run=self._service.run, name=name, token=token, config=config, needs_jetstream=False)
        async with bus:
            spoken_s = time.monotonic()
            renewed_s: dict[int, float] = {}
            while not self.ended.is_set() and time.monotonic() - spoken_s < _KEPT_S:
                if (held := self._held()) is not None:
                    spoken_s = time.monotonic()
                    await self._beat(bus, held)
                    for leases in self._service.leases:
                        if spoken_s - renewed_s.get(id(leases), 0.0) > leases.renew_s:
                            renewed_s[id(leases)] = spoken_s
                            await leases.renew_over(bus, _ANSWER_S)
                await asyncio.sleep(_BEAT_S)

    async def _beat(self, bus: NatsBus, held: HeldLoop) -> None:
        beat = self._service.last_beat
        if beat is None:
            return
        now_ns = time.time_ns()
        age_s = time.monotonic() - held.since_s
        notice = Notice(
            key=f"held/{held.name}",
            source=beat.service,
            what=f"{beat.service} is busy in {held.name} for {age_s:.0f} s, and nothing else of its process runs",
            since_ns=now_ns - round(age_s * 1e9),
            mend=held.cure,
        )
        stage = msgspec.structs.replace(beat.stage, notices=[*beat.stage.notices, notice])
        said = msgspec.structs.replace(beat, time_ns=now_ns, stage=stage)
        await bus.broadcast(subjects.heartbeat(beat.run, beat.service, beat.instance), encode(said))
        self._service.touch_alive_file()
