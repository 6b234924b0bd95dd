"""Checks for slow gains of a few raters that the others do not confirm."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow, is_number, mean
from lachesis.pipeline.health.logic.trends import correlation, slope_t
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["UnconfirmedGain"]

_POINT_GROUPS = 64
_MAX_POINTS = 96
"""Points of 64 groups that slopes are taken over: about 400 blocks of 16."""
_SHORT_POINTS = 24
_MIN_POINTS = 12
_FORM_POINTS = 48
"""First points of a run, in which form may be learned before what is worth more."""
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


def _named(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))[:200]
