"""A clock that goes on while the machine sleeps, for times that another process counts, too."""

import time

__all__ = ["SURE_SHARE", "boottime_s"]

SURE_SHARE = 0.9
"""Share of a time that another process has granted, for which it is counted on here: clocks run apart a little."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Return seconds since some earlier moment, those in which the machine slept included."""
    return time.clock_gettime(_CLOCK)
