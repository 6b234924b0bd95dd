"""Lets the periodic tasks of a machine's processes run at the same moments.

Each wake-up of a process costs more than what most periodic tasks do. So they all wait for multiples of their period on
one clock, which counts from the machine's start: a process that stands still wakes once for all of them, and what its
tasks send reaches the server together with what other processes of the machine send. Machines differ by chance.
"""

import time

import anyio

__all__ = ["seconds_to_tick", "sleep_until_tick"]


def seconds_to_tick(period_s: float, *, now_s: float | None = None) -> float:
    """Return the time to the next multiple of `period_s`: more than 0 seconds, and `period_s` at most.

    `now_s`: by `time.monotonic`; None: now.
    """
    now_s = time.monotonic() if now_s is None else now_s
    return period_s - now_s % period_s


async def sleep_until_tick(period_s: float) -> None:
    """Sleep until the next multiple of `period_s` seconds."""
    await anyio.sleep(seconds_to_tick(period_s))
