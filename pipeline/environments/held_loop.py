"""Speaks from a thread for a service whose event loop a plain function of an environment holds.

The thread has a connection of its own. Guarantees that from `SPEAKS_AFTER_S` seconds on the service's heartbeats go on,
with a notice that names the function, and that its leases are renewed; that this thread says nothing while the loop
runs; and that it falls silent after `limit_s`, so that a function which never returns is taken for hung like anything
else. A function that holds Python itself (one regular expression that never ends, say) keeps this thread from running.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio.to_thread
import msgspec

from lachesis.pipeline.bus.connection import connect
from lachesis.pipeline.bus.jetstream import NatsBus
from lachesis.pipeline.environments.leases import ProducerLeases
from lachesis.pipeline.environments.plain_hooks import HOOK_CURE, HOOKS, HeldLoop
from lachesis.pipeline.runtime.service import HEARTBEAT_S, Service
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.errors import LachesisError
from lachesis.schemas.notices import Notice

__all__ = ["SPEAKS_AFTER_S", "speaking_while_held"]

log = logging.getLogger("lachesis")

SPEAKS_AFTER_S: Final = 1.0
_LOOK_S = 0.25
_KEPT_S = 30.0
"""Seconds for which the connection is kept after a function has returned: slow ones come one after the other."""
_ANSWER_S = 2.0


@asynccontextmanager
async def speaking_while_held(
    service: Service, limit_s: float, leases: Sequence[ProducerLeases] = ()
) -> AsyncIterator[None]:
    """Speak for `service`, and renew `leases`, while a plain function holds the event loop.

    Each time for at most `limit_s`.
    """
    if not isinstance(service.bus, NatsBus):
        yield
        return
    speaker = _Speaker(service, service.bus, limit_s, leases)
    thread = threading.Thread(target=speaker.run, name="speaks while the loop is held", daemon=True)
    thread.start()
    try:
        yield
    finally:
        speaker.ended.set()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join, _LOOK_S + _ANSWER_S)


class _Speaker:
    def __init__(self, service: Service, bus: NatsBus, limit_s: float, leases: Sequence[ProducerLeases]) -> None:
        self.ended = threading.Event()
        self._service = service
        self._connection = bus.connection
        self._limit_s = limit_s
        self._leases = leases

    def run(self) -> None:
        """Look at the loop until `ended`."""
        while not self.ended.wait(_LOOK_S):
            if self._held() is None:
                continue
            try:
                asyncio.run(self._speak())
            except (LachesisError, OSError, TimeoutError) as error:
                log.debug("cannot speak for the held event loop: %s", error)

    def _held(self) -> HeldLoop | None:
        """Return what holds the loop long enough to be spoken of, and not too long."""
        held = HOOKS.held
        if held is None:
            return None
        age_s = time.monotonic() - held.since_s
        return held if SPEAKS_AFTER_S <= age_s <= self._limit_s else None

    async def _speak(self) -> None:
        config, token = self._connection
        name = f"{self._service.run}.{self._service.name}.held"
        bus = await connect(run=self._service.run, name=name, token=token, config=config, needs_jetstream=False)
        async with bus:
            spoken_s = time.monotonic()
            renewed_s = dict.fromkeys(self._leases, 0.0)
            while not self.ended.is_set() and time.monotonic() - spoken_s < _KEPT_S:
                if (held := self._held()) is not None:
                    spoken_s = time.monotonic()
                    await self._beat(bus, held)
                    for leases in [one for one in self._leases if spoken_s - renewed_s[one] > one.renew_s]:
                        renewed_s[leases] = spoken_s
                        await leases.renew_over(bus, _ANSWER_S)
                await asyncio.sleep(HEARTBEAT_S / 2)

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
            mend=HOOK_CURE,
        )
        stage = msgspec.structs.replace(beat.stage, notices=[*beat.stage.notices, notice])
        said = msgspec.structs.replace(beat, time_ns=now_ns, stage=stage)
        await bus.broadcast(subjects.heartbeat(beat.run, beat.service, beat.instance), encode(said))
        self._service.touch_alive_file()
