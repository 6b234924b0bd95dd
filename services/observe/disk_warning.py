"""Warns about the disk under a run's own server.

When it is full, the streams and the whole run stop.
"""

import time

from lachesis.pipeline.bus.disk_room import StoreFinding, assess, stored_bytes
from lachesis.pipeline.bus.store_reservation import store_budget
from lachesis.pipeline.common.disk import disk_room
from lachesis.pipeline.config.run import RunConfig

__all__ = ["DiskWarning"]

_MEASURE_S = 10.0
"""Between two measurements of what the store holds, which look at each of its files."""


class DiskWarning:
    """The disk of one run, looked at again and again."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._stored = 0
        self._measured_s = float("-inf")

    def finding(self) -> StoreFinding:
        """Return how the disk stands now: `ok` where the server is not the run's own."""
        store = self._config.store
        if store is None or not store.is_dir():
            return StoreFinding("ok")
        if time.monotonic() - self._measured_s >= _MEASURE_S:
            self._stored, self._measured_s = stored_bytes(store), time.monotonic()
        return assess(store, disk_room(store), self._stored, store_budget(store, self._config.streams))
