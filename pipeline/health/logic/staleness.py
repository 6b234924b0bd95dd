"""Checks how old groups are when they are trained, and whether long ones are dropped for it."""

from collections import deque
from collections.abc import Iterable
from statistics import median

from lachesis.pipeline.health.logic.check import (
    MAX_EXAMPLES,
    CheckResult,
    graded,
)
from lachesis.pipeline.health.logic.trends import longer_share

__all__ = ["StaleLengths", "Staleness"]

_STALE = 4.0
"""Optimizer steps from which on the age of a group matters to the loss."""
_MIN_STALE_GROUPS = 8
_MAX_LENGTHS = 4096


class Staleness:
    """Optimizer steps between the policy that made a group and the step that trains it, the 95th percentile over eight
    batches. It judges ledger entries: `record_batch` the lags of a batch's groups, then `evaluate` when eight are in.

    Counted from the policy that sampled its last tokens, more than `bound`, which is what the run allows
    (`batching.max_staleness`), warns: the batcher drops older groups, so the bound was lowered lately or something is
    broken; a quarantine follows where it lasts. Counted from the policy that sampled its first tokens, more than 4
    informs: plain clipped losses lose there what a decoupled one holds (AReaL, arXiv:2505.24298).
    """

    name = "staleness"

    def __init__(self, bound: int) -> None:
        self._bound = float(bound)
        self._lags: deque[tuple[int, int, str]] = deque(maxlen=4096)

    def record_batch(self, first: int, last: int, group: str) -> None:
        """Take in a group of a batch: the lags of its first and of its last tokens."""
        self._lags.append((first, last, group))

    def evaluate(self) -> CheckResult:
        """Judge what was added since the last time, and forget it."""
        lags = list(self._lags)
        self._lags.clear()
        if not lags:
            return CheckResult("idle", reason="no batches")
        bound = self._bound
        last, examples = _p95([(lag, group) for _, lag, group in lags])
        if last > bound:
            reason = f"a twentieth of the groups are {last:.0f} steps old or more when trained; {bound:.0f} are allowed"
            return CheckResult("warn", last, bound, reason, examples, grows=True)
        first, examples = _p95([(lag, group) for lag, _, group in lags])
        if first > _STALE:
            reason = f"in a twentieth of the groups tokens are {first:.0f} steps old or more when trained"
            return CheckResult("inform", first, _STALE, reason, examples)
        return CheckResult("ok", first, min(_STALE, bound))


def _p95(lags: list[tuple[int, str]]) -> tuple[float, list[str]]:
    """Return the 95th percentile of the lags, and the groups with the largest."""
    ordered = sorted(lags)
    return float(ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)][0]), [
        group for _, group in ordered[-MAX_EXAMPLES:]
    ]


class StaleLengths:
    """Groups that were dropped as stale against those that were trained: how often, taking one of each at random, the
    dropped one is longer (Mann & Whitney 1947; ties count half). It knows no unit: doubling every length changes
    nothing.

    > .65 warns where chance is ruled out (z > 3.3) and 8 groups or more were dropped: long answers are sorted out, and
    the policy learns from short ones. It is checked with the staleness.
    """

    name = "stale_lengths"

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_MAX_LENGTHS)
        self._stale: deque[float] = deque(maxlen=_MAX_LENGTHS)

    def record_lengths(self, kept: Iterable[float], stale: Iterable[float]) -> None:
        """Take in tokens of a sequence, of groups that are trained and of those dropped as stale."""
        self._kept.extend(kept)
        self._stale.extend(stale)

    def evaluate(self) -> CheckResult:
        """Judge what was added since the last time, and forget it."""
        kept, stale = sorted(self._kept), sorted(self._stale)
        self._kept.clear()
        self._stale.clear()
        if not kept or len(stale) < _MIN_STALE_GROUPS:
            return CheckResult("idle", reason="too few groups were dropped as stale" if kept else "no batches")
        share, z = longer_share(stale, kept)
        severity, threshold = graded(share, [(0.65, "warn")])
        if severity == "ok" or z <= 3.3:
            return CheckResult("ok", share, threshold)
        lengths = f"{median(stale):.0f} tokens a sequence (median), where those trained have {median(kept):.0f}"
        mend = (
            'set batching.staleness_of to "newest" if it is not, raise batching.max_staleness, add inference, or lower '
            "max_new_tokens or the number of turns"
        )
        reason = f"long answers are sorted out: {len(stale)} groups were dropped as stale, of {lengths}; {mend}"
        return CheckResult(severity, share, threshold, reason)
