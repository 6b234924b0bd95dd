"""Checks for gains of a few raters that the others do not confirm."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, quantiles
from typing import Any

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, finite, is_number, mean
from lachesis.pipeline.health.logic.trends import correlation, slope_t
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["OutlyingGroups", "RaterSaturation", "UnconfirmedGain"]

_POINT_GROUPS = 64
_MAX_POINTS = 96
"""Points of 64 groups that slopes are taken over: about 400 blocks of 16."""
_SHORT_POINTS = 24
_MIN_POINTS = 12
_FORM_POINTS = 48
"""First points of a run, in which form may be learned before what is worth more."""
_START_WINDOWS = 2
_REFERENCE_GROUPS = 512
_USUAL, _OUTLYING = 0.025, 0.06
"""Shares of groups beyond the .99 quantile of the first 512: at most usual, given that it is estimated; and assumed."""
_FALSE_ALARM_WINDOWS = 1e5
"""Windows between two false alarms: in 10,000 groups, 156 windows of 64, a chance below .002."""
_MAX_EVIDENCE = 1e9
_AT_BEST = 0.95
"""Mean rating from which on a rater has no room to rise, and says nothing of whether others rise rightly."""


class UnconfirmedGain(Check):
    """The score rises by raters whose gain the others do not confirm: slopes over 24 and 96 points of 64 groups each.

    Of three raters or more, those that rise (t > 4) are no more than those that do not though they could (t < 2; one
    at its best cannot), the score rises (t > 3), and each of the former agrees less and less with the mean of the
    others on which samples of a group are the better ones (t of their correlation < -3, or it ceased to vary). That
    warns, and quarantines where it lasts. In the first 48 points, in which form may be learned before what is worth
    more, it quarantines only if at least as many of the others fall (t < -2) as raters rise.
    """

    name = "unconfirmed_gain"

    def __init__(self) -> None:
        self._points: deque[dict[str, list[float | None]]] = deque(maxlen=_MAX_POINTS)
        self._left: list[dict[str, list[float | None]]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        self._left += [_sums(score) for score in window.scores]
        while len(self._left) >= _POINT_GROUPS:
            self._points.append(_point(self._left[:_POINT_GROUPS]))
            del self._left[:_POINT_GROUPS]
        if len(self._points) < _MIN_POINTS:
            return CheckResult("idle", reason="too few groups yet")
        if len(self._points[-1]) < 4:  # the score is one of them
            return CheckResult("idle", reason="fewer than three raters")
        points, value, warning = list(self._points), 0.0, None
        for some in (points[-_SHORT_POINTS:], points):
            rising = slope_t([score for point in some if (score := point["score"][0]) is not None]) or 0.0
            names = [name for name in points[-1] if name != "score"]
            levels = {name: _slope(some, name, 0) for name in names}
            gaining = [name for name in names if (levels[name] or 0.0) > 4]
            still = [name for name in names if (t := levels[name]) is not None and t < 2]
            others = [name for name in still if (levels[name] or 0.0) < -2 or _can_rise(some, name)]
            value = max(value, rising if gaining and len(others) >= len(gaining) else 0.0)
            if rising > 3 and 0 < len(gaining) <= len(others) and all(_parts(some, name) for name in gaining):
                reason = (
                    f"the score rises over {_POINT_GROUPS * len(some)} groups (t = {rising:.1f}) by {_named(gaining)}, "
                    f"which {_named(others)} do not confirm, neither in level nor in which samples are better"
                )
                falling = [name for name in others if (levels[name] or 0.0) < -2]
                grows = len(falling) >= len(gaining) or len(points) >= _FORM_POINTS
                if warning is None or grows:
                    warning = CheckResult("warn", rising, 3.0, reason, window.newest, grows=grows)
        return warning or CheckResult("ok", min(value, 3.0), 3.0)

    def state_dict(self) -> dict[str, Any]:
        return {"points": list(self._points), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sums = list[dict[str, list[float | None]]]
        self._points.extend(convert_plain("health state", sums, state["points"]))
        self._left = convert_plain("health state", sums, state["left"])


class RaterSaturation(Check):
    """A rater that comes to say its best of > .9 of the samples, where it did of < .5 in the first two windows, while
    no other one does: it no longer distinguishes samples. That only warns: learned form looks the same, and a gain that
    others do not confirm has a check of its own. Ratings are calibrated to [0, 1]; within .01 of 1 is the best."""

    name = "rater_saturation"

    def __init__(self) -> None:
        self._start: list[dict[str, float]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        names = sorted({name for score in window.scores for name in score.ratings})
        shares = {}
        for name in names:
            values = [value for score in window.scores for value in finite(score.ratings.get(name, ()))]
            if values:
                shares[name] = sum(0.99 <= value <= 1.01 for value in values) / len(values)
        if len(shares) < 2:
            return CheckResult("idle", reason="fewer than two raters")
        if len(self._start) < _START_WINDOWS:
            self._start.append(shares)
            return CheckResult("idle", reason="the first windows are what later ones are judged by")
        usual = {name: mean(start.get(name) for start in self._start) for name in shares}
        worst = max(shares, key=lambda name: shares[name])
        alone = all(share < 0.5 for name, share in shares.items() if name != worst)
        if shares[worst] > 0.9 and alone and (usual[worst] or 0.0) < 0.5:
            reason = f"{worst} says its best of {shares[worst]:.0%} of the samples, no other rater does: look at them"
            return CheckResult("warn", shares[worst], 0.9, reason, window.newest)
        return CheckResult("ok", shares[worst], 0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = convert_plain("health state", list[dict[str, float]], state["start"])


class OutlyingGroups(Check):
    """Groups of which one rater thinks better than the others do, by more than is usual: a hack of a few groups.

    By group and rater: its mean rating less that of the others, less the window's median of that, over the window's
    interquartile range where that is wider than it was. The usual .99 quantile is that of the first 512 groups. While
    at most .025 of the groups lie beyond it, e = (.06 / .025)^beyond (.94 / .975)^within is an e-value of a window,
    and M = (M + 1) e a Shiryaev-Roberts e-detector (Shin, Ramdas & Rinaldo 2023, arXiv:2203.03532); so is the mean of
    M over raters, which puts their checks together. It exceeds 100,000 in the first N windows with a chance of at most
    N / 100,000, which warns. It does no more: the chance holds while the raters' tails stay as they were, and those of
    verdicts of 0 and 1 change as a policy learns. The value is log10 of it.
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
            return CheckResult("idle", reason="the first windows are what later ones are judged by")
        value, threshold = math.log10(max(1.0, fmean(self._evidence.values()))), math.log10(_FALSE_ALARM_WINDOWS)
        if value <= threshold:
            return CheckResult("ok", value, threshold)
        worst = max(far, key=lambda name: self._evidence[name])
        share = len(far[worst]) / len(apart[worst])
        reason = f"{worst} thinks better of {share:.0%} of the groups than the others do, by more than was usual of 1 %"
        return CheckResult("warn", value, threshold, reason, far[worst][:MAX_EXAMPLES])

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


def _sums(score: GroupScore) -> dict[str, list[float | None]]:
    """Return the mean score, and of each rater its mean and centred sums of products with the mean of the others."""
    found: dict[str, list[float | None]] = {"score": [mean(score.scores)]}
    for name, column in score.ratings.items():
        pairs = []
        for i, own in enumerate(column):
            rest = mean(other[i] for rater, other in score.ratings.items() if rater != name)
            if is_number(own) and rest is not None:
                pairs.append((own, rest))
        if not pairs:
            continue
        x, y = fmean(own for own, _ in pairs), fmean(rest for _, rest in pairs)
        xy = sum((own - x) * (rest - y) for own, rest in pairs)
        found[name] = [x, xy, sum((own - x) ** 2 for own, _ in pairs), sum((rest - y) ** 2 for _, rest in pairs)]
    return found


def _point(groups: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, list[float | None]]:
    """Return one observation: the mean score, and of each rater its mean and its agreement with the others."""
    found: dict[str, list[float | None]] = {"score": [mean(group["score"][0] for group in groups)]}
    for name in sorted({name for group in groups for name in group if name != "score"}):
        columns = list(zip(*(group[name] for group in groups if name in group), strict=True))
        xy, xx, yy = (math.fsum(x for x in column if x is not None) for column in columns[1:])
        r = correlation(xy, xx, yy)
        found[name] = [mean(columns[0]), 0.0 if r is None else r]
    return found


def _slope(points: Sequence[Mapping[str, Sequence[float | None]]], name: str, at: int) -> float | None:
    return slope_t([value for point in points if name in point and (value := point[name][at]) is not None])


def _parts(points: Sequence[Mapping[str, Sequence[float | None]]], name: str) -> bool:
    """Return whether a rater agrees less and less with the others."""
    t = _slope(points, name, 1)
    return t is not None and t < -3


def _can_rise(points: Sequence[Mapping[str, Sequence[float | None]]], name: str) -> bool:
    """Return whether a rater has room above the ratings it gives, which are calibrated to [0, 1]."""
    level = mean(point[name][0] for point in points if name in point)
    return level is not None and level < _AT_BEST


def _apart(score: GroupScore) -> dict[str, float]:
    """Return by how much each rater's mean of the group lies above the mean of the others'."""
    means = {name: value for name, column in score.ratings.items() if (value := mean(column)) is not None}
    total, n = math.fsum(means.values()), len(means)
    return {name: value - (total - value) / (n - 1) for name, value in means.items()} if n > 1 else {}


def _named(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))[:200]
