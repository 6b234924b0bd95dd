"""Checks of change: has the distribution of scores moved from what it was in the windows before?

A policy that learns moves scores too, so these checks only inform. All of them use mean scores of groups: samples of
one prompt are not independent, groups nearly are. Each check names its thresholds and their sources.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow, graded

__all__ = ["BLOCK", "MIN_SAMPLES", "ChangePoint", "RewardDrift", "ScoreShift"]

BLOCK = 16
"""Groups that are one observation of a check of change: about an optimizer step."""
_CHI2_999 = (10.828, 13.816, 16.266, 18.467, 20.515, 22.458, 24.322, 26.124, 27.877)
"""The .999 quantile of chi-squared with 1, 2, ... 9 degrees of freedom."""
MIN_SAMPLES = 64
"""Groups before the window, without which there is nothing to compare it with."""
_DELTA = 0.002


class RewardDrift(Check):
    """Population stability index against the windows before: PSI = sum (q-p) ln(q/p), counts smoothed by .5.

    Beyond .1 it informs. Edges are deciles, frozen at the start. The usual .1 fires by chance on small samples (71 % of
    windows of 64 against 512), so that it is raised to c (1/n + 1/m), c the .999 quantile of chi-squared with bins - 1
    degrees: PSI is near chi-squared times (1/n + 1/m) (Yurdakul 2018).
    """

    name = "reward_drift"

    def __init__(self) -> None:
        self._edges: list[float] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        now, before = window.means(), window.before
        if not now or len(before) < MIN_SAMPLES:
            return CheckResult("idle", reason="no scores" if not now else "too few windows yet")
        if not self._edges:
            ranked = sorted(before)
            self._edges = sorted({ranked[len(ranked) * i // 10] for i in range(1, 10)})
        bins = len(self._edges) + 1
        p, q = self._shares(before, bins), self._shares(now, bins)
        value = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
        chance = _CHI2_999[bins - 2] * (1 / len(now) + 1 / len(before))
        severity, threshold = graded(value, [(max(0.1, chance), "inform")])
        reason = "" if severity == "ok" else f"mean scores moved from {fmean(before):.3f} to {fmean(now):.3f}"
        return CheckResult(severity, value, threshold, reason, window.newest if reason else ())

    def _shares(self, values: Sequence[float], bins: int) -> list[float]:
        counts = [0.5] * bins
        for value in values:
            counts[bisect_right(self._edges, value)] += 1
        total = sum(counts)
        return [count / total for count in counts]

    def state_dict(self) -> dict[str, Any]:
        return {"edges": self._edges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._edges = [float(edge) for edge in state["edges"]]


class ScoreShift(Check):
    """Two-sample Kolmogorov-Smirnov against the windows before: sup |F-G| > 1.95 sqrt((n+m)/(n m)) informs
    (alpha = .001). For continuous scores alone: with fewer than 20 different ones it is idle."""

    name = "score_shift"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        now, before = sorted(window.means()), sorted(window.before)
        if not now or len(before) < MIN_SAMPLES:
            return CheckResult("idle", reason="no scores" if not now else "too few windows yet")
        points = sorted({*now, *before})
        if len(points) < 20:
            return CheckResult("idle", reason="scores are not continuous")
        n, m = len(now), len(before)
        value = max(abs(bisect_right(now, x) / n - bisect_right(before, x) / m) for x in points)
        severity, threshold = graded(value, [(1.95 * math.sqrt((n + m) / (n * m)), "inform")])
        reason = (
            ""
            if severity == "ok"
            else f"the distribution of scores changed, mean {fmean(before):.3f} -> {fmean(now):.3f}"
        )
        return CheckResult(severity, value, threshold, reason, window.newest if reason else ())


class ChangePoint(Check):
    """ADWIN (Bifet & Gavalda 2007) over mean scores of groups: the newest ones, as many as there was no change in.

    Whenever the means of an older and a newer part differ by more than chance (delta = .002, shared by all cuts), the
    older part is dropped, which informs; the value is that difference over its bound. Unlike the others it has no
    reference that grows old. Held are 128 blocks, so every cut between two of them is looked at.
    """

    name = "change_point"

    def __init__(self) -> None:
        self._blocks: deque[list[float]] = deque(maxlen=128)  # mean, mean square, lowest, highest
        self._left: list[float] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        values = [*self._left, *window.means()]
        end = len(values) - len(values) % BLOCK
        self._left = values[end:]
        if not window.means():
            return CheckResult("idle", reason="no scores")
        worst, said = 0.0, ""
        for start in range(0, end, BLOCK):
            block = values[start : start + BLOCK]
            self._blocks.append([fmean(block), fmean(value * value for value in block), min(block), max(block)])
            while (cut := _change(list(self._blocks))).excess > 1:
                for _ in range(cut.at):
                    self._blocks.popleft()
                worst, said = max(worst, cut.excess), f"mean scores changed from {cut.before:.3f} to {cut.after:.3f}"
            worst = max(worst, cut.excess)
        if len(self._blocks) < 2 and not said:
            return CheckResult("idle", reason="too few windows yet")
        return CheckResult("inform" if said else "ok", worst, 1.0, said, window.newest if said else ())

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": list(self._blocks), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._blocks.extend([float(value) for value in block] for block in state["blocks"])
        self._left = [float(value) for value in state["left"]]


class _ChangePointCut(NamedTuple):
    excess: float
    at: int
    before: float
    after: float


def _change(found: Sequence[Sequence[float]]) -> _ChangePointCut:
    """Return the cut between blocks that speaks most for a change: the difference of means over ADWIN's bound.

    bound = sqrt(2/m s^2 ln(2/d)) + 2/(3m) r ln(2/d) with 1/m = 1/n0 + 1/n1, d = delta / n; r, the range of the values,
    stands for the 1 of values in [0, 1].
    """
    n, best = BLOCK * len(found), _ChangePointCut(0.0, 0, 0.0, 0.0)
    total = math.fsum(block[0] for block in found)
    variance = max(0.0, fmean(block[1] for block in found) - (total / len(found)) ** 2)
    reach = max(block[3] for block in found) - min(block[2] for block in found)
    log, older = math.log(2 * n / _DELTA), 0.0
    for at in range(1, len(found)):
        older += found[at - 1][0]
        before, after = older / at, (total - older) / (len(found) - at)
        inverse = 1 / (BLOCK * at) + 1 / (n - BLOCK * at)
        bound = math.sqrt(2 * inverse * variance * log) + 2 / 3 * inverse * reach * log
        excess = abs(before - after) / bound if bound > 0 else 0.0
        if excess > best.excess:
            best = _ChangePointCut(excess, at, before, after)
    return best
