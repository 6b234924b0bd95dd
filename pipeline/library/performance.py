"""Tracks the calls of a loop of your own: latency, rates and failures."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from lachesis.pipeline.telemetry.performance import CallRecord, Performance
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["PerformanceTracker"]


class PerformanceTracker:
    """Figures over the last `window` calls; one that takes longer than `slow_ms` milliseconds counts as slow."""

    def __init__(self, *, window: int = 200, slow_ms: float = 5000.0, prefix: str = "api_perf") -> None:
        if window < 1:
            raise ConfigError(f"window: {window!r} calls; give 1 or more")
        self._performance = Performance(window, slow_ms)
        self._prefix = prefix

    def record(self, seconds: float, *, items: int = 1, failed: bool = False, payload: int | None = None) -> None:
        """Count a call that has just ended. `payload`: its size in bytes, if it has one.

        Raises `DataError` where the seconds are no duration.
        """
        if not (math.isfinite(seconds) and seconds >= 0):
            raise DataError(f"seconds: a call lasted {seconds!r}; give a finite number of 0 or more")
        self._performance.record(CallRecord(time.monotonic(), seconds, items, failed, payload))

    @contextmanager
    def track(self, *, items: int = 1) -> Iterator[None]:
        """Time the code in the context; an exception counts as a failed call, and propagates."""
        started = time.monotonic()
        failed = True
        try:
            yield
            failed = False
        finally:
            self.record(time.monotonic() - started, items=items, failed=failed)

    def metrics(self) -> dict[str, float]:
        """Return the figures by name; nothing before the first call."""
        return self._performance.figures(self._prefix)
