"""Shows in a service's figures that the bus stands still; logs when that begins, changes or is over."""

import logging
import time

import msgspec

from lachesis.pipeline.bus.server_waits import ServerStall
from lachesis.schemas.control import StageVitals

__all__ = ["ShownStall"]

log = logging.getLogger("lachesis")


class ShownStall:
    """What was logged last of a stall."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._since_s = 0.0

    def apply(self, stall: ServerStall | None, stage: StageVitals) -> StageVitals:
        """Return the figures with a stall as state and note."""
        if stall is None:
            if self._reason is not None:
                log.info("goes on after %.0f s: %s", time.monotonic() - self._since_s, self._reason)
            self._reason = None
            return stage
        if self._reason is None:
            self._since_s = time.monotonic() - stall.seconds
        if self._reason != stall.reason:
            log.warning("%s", stall)
            self._reason = stall.reason
        note = f"{stall}; {stage.note}" if stage.note else str(stall)
        if stage.state != "ok":
            return msgspec.structs.replace(stage, note=note)
        since_ns = time.time_ns() - round(stall.seconds * 1e9)
        return msgspec.structs.replace(stage, state="waiting", note=note, since_ns=since_ns)
