"""Checks for groups of which one rater thinks unusually better than the others do."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, mean
from lachesis.schemas.annotations import GroupScore

__all__ = ["OutlyingGroups"]

_REFERENCE_GROUPS = 512
_USUAL, _OUTLYING = 0.025, 0.06
"""Shares of groups beyond the .99 quantile of the first 512: at most usual, given that it is estimated; and assumed."""
_FALSE_ALARM_WINDOWS = 1e5
"""Windows between two false alarms: in 10,000 groups, 156 windows of 64, a chance below .002."""
_MAX_EVIDENCE = 1e9


class OutlyingGroups(Check):
    """Groups of which one rater thinks better than the others do, by more than is usual: a hack of a few groups.

    By group and rater: its mean rating less that of the others, less the window's median of that, over the window's
    interquartile range where that is wider than it was. The usual .99 quantile is that of the first 512 groups. While
    at most .025 of the groups lie beyond it, e = (.06 / .025)^beyond (.94 / .975)^within is an e-value of a window,
    and M = (M + 1) e a Shiryaev-Roberts e-detector (Shin, Ramdas & Rinaldo 2023, arXiv:2203.03532); so is the mean of
    M over raters, which puts their checks together. It exceeds 100,000 in the first N windows with a chance of at most
    N / 100,000, which informs. It does no more: the chance holds while the raters' tails stay as they were, and those
    of verdicts of 0 and 1 change as a policy learns. The value is log10 of it.
    """

    name = "outlying_groups"

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._usual: dict[str, tuple[float, float]] = {}  # by rater: quantile and interquartile range
        self._evidence: dict[str, float] = {}

    def evaluate(self, window: HealthWindow) -> CheckResult:
        apart: dict[str, list[tuple[float, str]]] = {}
        for score in window.scores:
            for name, value in _apart(score).items():
                apart.setdefault(name, []).append((value, score.group))
        apart = {name: found for name, found in apart.items() if len(found) >= 16}
        if not apart:
            return CheckResult("idle", reason="too few groups with two raters or more")
        far: dict[str, list[str]] = {}
        for name, found in apart.items():
            low, centre, high = quantiles([value for value, _ in found], n=4)
            if name not in self._usual:
                self._learn(name, [value - centre for value, _ in found])
                continue
            bound, spread = self._usual[name]
            wider = max(1.0, (high - low) / spread) if spread > 0 else 1.0
            far[name] = [group for value, group in found if value - centre > bound * wider]
            beyond, within = len(far[name]), len(found) - len(far[name])
            log = beyond * math.log(_OUTLYING / _USUAL) + within * math.log((1 - _OUTLYING) / (1 - _USUAL))
            evidence = (self._evidence.get(name, 0.0) + 1) * math.exp(min(log, 20.0))
            self._evidence[name] = min(_MAX_EVIDENCE, evidence)
        if not far:
            return CheckResult("idle", reason="the first windows are what later ones are compared with")
        value, threshold = math.log10(max(1.0, fmean(self._evidence.values()))), math.log10(_FALSE_ALARM_WINDOWS)
        if value <= threshold:
            return CheckResult("ok", value, threshold)
        worst = max(far, key=lambda name: self._evidence[name])
        share = len(far[worst]) / len(apart[worst])
        reason = f"{worst} thinks better of {share:.0%} of the groups than the others do, by more than was usual of 1 %"
        return CheckResult("inform", value, threshold, reason, far[worst][:MAX_EXAMPLES])

    def _learn(self, name: str, values: Sequence[float]) -> None:
        """Take in a window of the first 512 groups, and learn from them what is usual when they are complete."""
        first = self._first.setdefault(name, [])
        first += values
        if len(first) >= _REFERENCE_GROUPS:
            low, _, high = quantiles(first, n=4)
            ranked = sorted(self._first.pop(name))
            self._usual[name] = max(ranked[len(ranked) * 99 // 100], 1e-9), high - low

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first, "usual": self._usual, "evidence": self._evidence}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._first = {name: [float(value) for value in values] for name, values in state["first"].items()}
        self._usual = {name: (float(bound), float(spread)) for name, (bound, spread) in state["usual"].items()}
        self._evidence = {name: float(value) for name, value in state["evidence"].items()}


def _apart(score: GroupScore) -> dict[str, float]:
    """Return by how much each rater's mean of the group lies above the mean of the others'."""
    means = {name: value for name, column in score.ratings.items() if (value := mean(column)) is not None}
    total, n = math.fsum(means.values()), len(means)
    return {name: value - (total - value) / (n - 1) for name, value in means.items()} if n > 1 else {}
