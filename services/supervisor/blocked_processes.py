"""Names the code that holds a process's interpreter, and renews the leases of that process meanwhile.

Guarantees that within about `AFTER_S` the line at which such a process stands is known, and that its leases are renewed
from here until it goes on, so that nothing that it generates is granted a second time.
"""

from collections.abc import Mapping
from typing import Final

import anyio
from anyio.abc import TaskGroup

from lachesis.pipeline.bus.api import Bus
from lachesis.pipeline.environment.leases import leases_of
from lachesis.pipeline.errors import InfrastructureError
from lachesis.pipeline.runtime.blocked_interpreter import held_place
from lachesis.schemas import subjects
from lachesis.schemas.codec import encode
from lachesis.schemas.control import LeaseRequest

__all__ = ["AFTER_S", "BlockedProcesses"]

AFTER_S: Final = 2.0
"""Seconds of silence after which a process is looked at: a service sends a heartbeat each second."""
_RENEW_S = 4.0
_ANSWER_S = 2.0


class BlockedProcesses:
    """The processes of a run that are held, by pid with the line."""

    def __init__(self, bus: Bus, run: str) -> None:
        self._bus = bus
        self._run = run
        self._renewed_s: dict[int, float] = {}

    def check(self, silent_s: Mapping[int, float], renewing: TaskGroup) -> dict[int, str]:
        """Return by pid where processes are held that are silent for so long.

        Their leases are renewed in `renewing`.
        """
        found = {pid: place for pid, s in silent_s.items() if s >= AFTER_S and (place := held_place(pid)) is not None}
        now_s = anyio.current_time()
        self._renewed_s = {pid: at for pid, at in self._renewed_s.items() if pid in found}
        for pid in found:
            if now_s - self._renewed_s.get(pid, float("-inf")) >= _RENEW_S:
                self._renewed_s[pid] = now_s
                for request in leases_of(pid):
                    renewing.start_soon(self._renew, request)
        return found

    async def _renew(self, request: LeaseRequest) -> None:
        subject = subjects.lease(self._run, request.env)
        try:
            await self._bus.request(subject, encode(request), timeout_s=_ANSWER_S)
        except InfrastructureError:
            return  # the governor is away: it waits one lease period after its return, so ours still count
