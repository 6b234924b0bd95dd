"""A clock that goes on while the machine sleeps, or a process is stopped."""

import time

__all__ = ["awake_or_not_s"]

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def awake_or_not_s() -> float:
    """Return seconds since some moment in the past, those in which the machine slept included."""
    return time.clock_gettime(_CLOCK)
