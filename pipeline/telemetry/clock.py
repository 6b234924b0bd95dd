"""The clock of stamps and spans: the time of the NATS server, as well as this process knows it.

Stored messages carry the server's time; stamps of several machines can only be compared with it, and with each other,
on one clock. Durations come from the monotonic counter, so a wall clock that is set in between changes none of them.
"""

import time

__all__ = ["Clock"]


class Clock:
    """Unix ns: this machine's time until the server's was measured. `uncertainty_ns` bounds the last measurement."""

    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self.uncertainty_ns: int | None = None

    def now_ns(self) -> int:
        """Return the server's time, ns."""
        return time.perf_counter_ns() + self._epoch_ns

    def at_ns(self, perf_counter_ns: int) -> int:
        """Return what the server's time was when `time.perf_counter_ns` read `perf_counter_ns`."""
        return perf_counter_ns + self._epoch_ns

    def measured(self, sent_ns: int, answered_ns: int, server_ns: int) -> None:
        """Record one exchange with the server.

        The times of request and answer are of `time.perf_counter_ns`.

        The server's time is taken to be that of the exchange's middle, so it is off by half the exchange at most.
        """
        self._epoch_ns = server_ns - (sent_ns + answered_ns) // 2
        self.uncertainty_ns = (answered_ns - sent_ns) // 2
