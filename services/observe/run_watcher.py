"""The interface of watchers that observe a run over the supervisor's connection."""

from typing import Protocol

from lachesis.pipeline.bus.api import Bus

__all__ = ["RunWatcher"]


class RunWatcher(Protocol):
    """Looks on at a run, and ends with it."""

    async def follow(self, bus: Bus) -> None:
        """Look on until cancelled."""

    async def finish(self, bus: Bus) -> None:
        """Take in what came last, once every service has ended.

        Must not raise where the server is unavailable.
        """
