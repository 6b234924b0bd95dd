"""The rule that says which traces are kept, and why. Pure.

A share of all rollouts is drawn by their ids, so that each process knows alone which ones to trace on the way. A
rollout that turns out to be worth a look at its end is kept as well: its trace is then rebuilt from its stamps.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from lachesis.pipeline.telemetry.histogram import Histogram
from lachesis.schemas.annotations import Stamp

__all__ = ["REASONS", "SLOW_WINDOW", "RecentHistogram", "SamplingReason", "TraceSampler", "is_late", "is_sampled"]

_RANDOM_BITS = 56
SLOW_WINDOW = 500
"""Rollouts in each half of the window that "slow" compares with: the last 500 to 1,000."""
_MIN_COMPARED = 200
"""Rollouts below which none is called slow by comparison."""
_RECOMPUTE_EVERY = 50
"""Rollouts after which the p99 is computed again."""

SamplingReason = Literal["failed", "stale", "late", "redelivered", "slow", "ratio"]
"""Why a trace is kept; of several reasons the first counts.

failed: it ended for a fault (dead, unscorable, oversized, its lease expired, a void batch). stale: it became too old.
late: a deadline passed before its teacher came. redelivered: a stage got it more than once. slow: see `TraceSampler`.
ratio: it is of the share drawn by id.
"""
REASONS: tuple[SamplingReason, ...] = get_args(SamplingReason)
_FAILED = frozenset({"dead", "unscorable", "oversized", "lease_expired", "void"})
"""Ends that no setting asks for. Settings do ask for a quarantine, a group without variance and a duplicate."""


def is_sampled(group: str, ratio: float) -> bool:
    """Return whether a group is of the sampled share, 0 to 1. Every process says the same.

    The last 56 bits of a group id are random, as W3C Trace Context level 2 asks of trace ids.
    """
    return int(group[-_RANDOM_BITS // 4 :], 16) < ratio * (1 << _RANDOM_BITS)


def is_late(stamps: Sequence[Stamp]) -> bool:
    """Return whether a group that was to have a teacher's logprobs went on before its teacher came.

    Without any stamps, which a very large ledger entry leaves out, nothing is known.
    """
    return bool(stamps) and not any(stamp.stage == "teacher" for stamp in stamps)


class RecentHistogram:
    """A histogram of the last `half` to 2 x `half` values: two halves, of which the older one is dropped when the newer
    one is full."""

    def __init__(self, half: int) -> None:
        self._half = half
        self._older, self._newer = Histogram(), Histogram()

    @property
    def count(self) -> int:
        """How many values the window holds."""
        return self._older.count + self._newer.count

    def record(self, value: float) -> None:
        """Count one value, seconds."""
        if self._newer.count == self._half:
            self._older, self._newer = self._newer, Histogram()
        self._newer.record(value)

    def quantile(self, q: float) -> float | None:
        """Return the q-quantile of the window in seconds, None when it is empty."""
        both = Histogram()
        both.merge(self._older)
        both.merge(self._newer)
        return both.quantile(q)


class TraceSampler:
    """Decides at a rollout's end whether to keep its trace.

    Slow is what took longer than `slow_s` seconds; None: longer than 99 of 100 of the last 500 to 1,000 rollouts, once
    there are 200. An older stall therefore does not make later rollouts look fast.
    """

    def __init__(self, ratio: float, slow_s: float | None) -> None:
        self._ratio = ratio
        self._slow_s = slow_s
        self._recent = RecentHistogram(SLOW_WINDOW)
        self._p99: float | None = None
        self._ended = 0
        self.kept = 0

    def reason(
        self, group: str, stamps: Iterable[Stamp], e2e_s: float, *, cause: str | None = None, late: bool = False
    ) -> SamplingReason | None:
        """Return why the trace of a rollout that took `e2e_s` seconds is kept, None if it is not.

        `cause` and `late`: as in `RolloutEnd`.
        """
        found = self._reason(group, stamps, e2e_s, cause, late=late)
        self._recent.record(e2e_s)
        self._ended += 1
        if self._ended % _RECOMPUTE_EVERY == 0 and self._recent.count >= _MIN_COMPARED:
            self._p99 = self._recent.quantile(0.99)
        self.kept += found is not None
        return found

    def _reason(
        self, group: str, stamps: Iterable[Stamp], e2e_s: float, cause: str | None, *, late: bool
    ) -> SamplingReason | None:
        limit_s = self._p99 if self._slow_s is None else self._slow_s
        reasons: dict[SamplingReason, bool] = {
            "failed": cause in _FAILED,
            "stale": cause == "stale",
            "late": late,
            "redelivered": any(stamp.attempt > 1 for stamp in stamps),
            "slow": limit_s is not None and e2e_s > limit_s,
            "ratio": is_sampled(group, self._ratio),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    @property
    def sampled_ratio(self) -> float | None:
        """Traces kept per rollout that ended, None before one did."""
        return self.kept / self._ended if self._ended else None
