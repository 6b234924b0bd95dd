"""Tracks the calls of a loop of your own: latency, rates and failures."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from lachesis.pipeline.common.number_arguments import setting_number, whole_number
from lachesis.pipeline.common.real_number import finite_number
from lachesis.pipeline.telemetry.performance import CallRecord, Performance
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["PerformanceTracker"]


class PerformanceTracker:
    """Figures over the last `window` calls; one that takes longer than `slow_ms` milliseconds counts as slow."""

    def __init__(self, *, window: int = 200, slow_ms: float = 5000.0, prefix: str = "api_perf") -> None:
        """Begin without a call. Raises `ConfigError` on a window, a limit or a prefix that is none."""
        try:
            window = whole_number("window", window, least=1)
        except DataError as error:
            raise ConfigError(str(error)) from error
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix is {prefix!r:.80}; give a text")
        slow_ms = setting_number("slow_ms", slow_ms)
        if slow_ms < 0:
            raise ConfigError(f"slow_ms is {slow_ms:g}; give 0 or more milliseconds")
        self._performance = Performance(window, slow_ms)
        self._prefix = prefix

    def record(self, seconds: float, *, items: int = 1, failed: bool = False, payload: int | None = None) -> None:
        """Count a call that has just ended. `payload`: its size in bytes, if it has one.

        Raises `DataError` where the seconds are no duration, the items or the payload no number, `failed` no truth.
        """
        try:
            duration = finite_number(seconds)
        except ValueError as error:
            raise DataError(f"seconds: a call lasted {error}; give a finite number of 0 or more") from error
        if duration < 0:
            raise DataError(f"seconds: a call lasted {duration:g}; give a finite number of 0 or more")
        if not isinstance(failed, bool | np.bool_):
            raise DataError(f"failed is {failed!r:.80}; give True or False")
        items = whole_number("items", items)
        payload = None if payload is None else whole_number("payload", payload)
        self._performance.record(CallRecord(time.monotonic(), duration, items, bool(failed), payload))

    @contextmanager
    def track(self, *, items: int = 1) -> Iterator[None]:
        """Time the code in the context; an exception counts as a failed call, and propagates."""
        items = whole_number("items", items)
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
