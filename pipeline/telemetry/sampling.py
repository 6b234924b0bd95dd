"""Which traces are kept. Pure.

A share of all rollouts is drawn by their ids, so that every process knows alone which to trace on the way. What turns
out to be worth a look at its end (slow, redelivered, not trained because something failed) is kept as well: its trace
is then rebuilt from its stamps.
"""

from collections.abc import Iterable

from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.annotations import Stamp

__all__ = ["Keeper", "is_sampled"]

_RANDOM_BITS = 56
_FEW = 200
"""Rollouts below which nothing is called slow by comparison."""


def is_sampled(group: str, ratio: float) -> bool:
    """Return whether a group is of the sampled share, 0 to 1. Every process says the same.

    The last 56 bits of a group id are random, as W3C Trace Context level 2 asks of trace ids.
    """
    return int(group[-_RANDOM_BITS // 4 :], 16) < ratio * (1 << _RANDOM_BITS)


class Keeper:
    """Decides at a rollout's end whether to keep its trace. `slow_s` None: slower than 99 of 100 before it."""

    def __init__(self, ratio: float, slow_s: float | None) -> None:
        self._ratio = ratio
        self._slow_s = slow_s
        self._seen = Histogram()
        self._p99: float | None = None
        self.kept = 0

    def reason(self, group: str, stamps: Iterable[Stamp], e2e_s: float, *, failed: bool) -> str | None:
        """Return why the trace of a rollout that took `e2e_s` seconds is kept, None if it is not."""
        found = self._reason(group, stamps, e2e_s, failed=failed)
        self._seen.record(e2e_s)
        if self._seen.count % _FEW == 0:
            self._p99 = self._seen.quantile(0.99)
        self.kept += found is not None
        return found

    def _reason(self, group: str, stamps: Iterable[Stamp], e2e_s: float, *, failed: bool) -> str | None:
        if is_sampled(group, self._ratio):
            return "ratio"
        if failed:
            return "failed"
        if any(stamp.attempt > 1 for stamp in stamps):
            return "redelivered"
        limit_s = self._p99 if self._slow_s is None else self._slow_s
        return "slow" if limit_s is not None and e2e_s > limit_s else None

    @property
    def kept_ratio(self) -> float | None:
        """Traces kept per rollout that ended, None before one did."""
        return self.kept / self._seen.count if self._seen.count else None
