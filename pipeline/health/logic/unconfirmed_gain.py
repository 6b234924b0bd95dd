"""Checks for gains that a rater which could confirm them does not confirm."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow, finite, is_number, mean
from lachesis.pipeline.health.logic.trends import correlation, slope_t
from lachesis.schemas.alerts import Severity
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["UnconfirmedGain"]

_POINT_GROUPS = 64
_HORIZONS = (24, 48, 96)
"""Points of 64 groups that slopes are taken over."""
_MIN_POINTS = 12
_END_POINTS = 8
"""Points at each end of a horizon that agreement is compared between: 512 groups."""
_GAIN_T, _SCORE_T, _CONTRADICTING_T = 4.0, 3.0, -3.3
_SINKING_T, _FALLING_T = -2.0, -4.0
_FORM_POINTS = 48
"""First points of a run, in which form may be learned before what is worth more."""
_CONFIRMED = 0.6
"""Share of the expected rise that confirms a gain."""
_ROOM = 0.5
"""Share of the room above a rating that a rater can be expected to use up."""
_MIN_AGREEMENT = 0.2
"""Correlation from which on a rater can confirm what another says."""
_LOST, _MOSTLY_LOST = 0.25, 0.5
"""Shares of the agreement at the start of a horizon by which it has fallen at the end."""
_SURE_ERRORS = 3.0
_MAX_RATERS = 8
"""Raters that are compared with each other: 28 pairs, or some 2 KiB a point. Of more, the first by name."""


class _Sums(msgspec.Struct, array_like=True):
    """Sums over samples, centred within groups, of a pair of raters x and y and of the logarithm of length, l."""

    n: int = 0
    xy: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xl: float = 0.0
    yl: float = 0.0
    ll: float = 0.0

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(
            *(a + b for a, b in zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True))
        )

    def turned(self) -> "_Sums":
        """Return the sums with x and y exchanged."""
        return _Sums(self.n, self.xy, self.yy, self.xx, self.yl, self.xl, self.ll)

    def beside_length(self) -> tuple[float, float, float]:
        """Return the sums xy, xx, yy of what length does not explain."""
        if self.ll <= 0:
            return self.xy, self.xx, self.yy
        return (
            self.xy - self.xl * self.yl / self.ll,
            self.xx - self.xl * self.xl / self.ll,
            self.yy - self.yl * self.yl / self.ll,
        )


class _Point(msgspec.Struct):
    """64 groups: the mean score, the mean of each rater, and the sums of each pair "x y" by names in order."""

    score: float | None
    means: dict[str, float]
    pairs: dict[str, _Sums]


class _Doubt(NamedTuple):
    """A rater that does not confirm another's gain. `sinks`: its ratings fall; `falls`: clearly, and r to half."""

    name: str
    t: float
    before: float
    after: float
    sinks: bool
    falls: bool


class UnconfirmedGain(Check):
    """The score rises by raters whose gain is not confirmed by another one that could: slopes over 24, 48 and 96 points
    of 64 groups each.

    Two raters agree where they find the same samples of a group better: r is their correlation within groups, of what
    length does not explain, so that a rater of brevity is no witness. Rater y doubts the gain of x (t > 4) if
    - it could confirm it: r > .2 at the start of the horizon;
    - it does not: it rises by less than .6 of b times the rise of x (t of the difference < -3.3), where b is the slope
      of y on x within groups, beside length, at the start; y is expected to use up no more than half of the room above
      it. The noise of x makes b smaller, and that of y the difference less sure;
    - they part: r fell by a quarter or more, and by three standard errors.
    While the score rises (t > 3), that warns if those in doubt are no more than those that doubt them, of three raters
    or more, or if each is doubted by one that falls (t < -4) and by which r fell to half. A warning that lasts
    quarantines. In the first 48 points, in which form may be learned before what is worth more, it only informs if none
    that doubts falls (t < -2). Of more than eight raters, the first eight by name are compared. The value is how surely
    the clearest doubt contradicts the gain, -t.
    """

    name = "unconfirmed_gain"

    def __init__(self) -> None:
        self._points: deque[_Point] = deque(maxlen=_HORIZONS[-1])
        self._left: list[_Point] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        self._left += [_group_point(score) for score in window.scores]
        while len(self._left) >= _POINT_GROUPS:
            self._points.append(_together(self._left[:_POINT_GROUPS]))
            del self._left[:_POINT_GROUPS]
        if len(self._points) < _MIN_POINTS:
            return CheckResult("idle", reason="too few groups yet")
        if len(self._points[-1].means) < 2:
            return CheckResult("idle", reason="fewer than two raters")
        points, most = list(self._points), 0.0
        horizons = [points[-horizon:] for horizon in _HORIZONS if horizon <= len(points)] or [points]
        rising = max(slope_t([point.score for point in some if point.score is not None]) or 0.0 for some in horizons)
        if rising <= _SCORE_T:
            return CheckResult("ok", 0.0, -_CONTRADICTING_T)
        for some in horizons:
            doubts = _doubts(some)
            if not doubts:
                continue
            witnesses = sorted({doubt.name for found in doubts.values() for doubt in found} - doubts.keys())
            outvoted = len(doubts) <= len(witnesses) and len(some[-1].means) > 2
            refuted = all(any(doubt.falls for doubt in found) for found in doubts.values())
            clearest = min((doubt for found in doubts.values() for doubt in found), key=lambda doubt: doubt.t)
            most = max(most, -clearest.t)
            if outvoted or refuted:
                reason = (
                    f"the score rises over {_POINT_GROUPS * len(some)} groups by {_named(doubts)}, which "
                    f"{_named(witnesses)} could confirm, but does not (t = {clearest.t:.1f}), and agrees less on which "
                    f"samples are better (r = {clearest.before:.2f} -> {clearest.after:.2f})"
                )
                early = len(points) < _FORM_POINTS and not any(
                    doubt.sinks for found in doubts.values() for doubt in found
                )
                severity: Severity = "inform" if early else "warn"
                return CheckResult(severity, -clearest.t, -_CONTRADICTING_T, reason, window.newest, grows=not early)
        return CheckResult("ok", min(most, -_CONTRADICTING_T), -_CONTRADICTING_T)

    def state_dict(self) -> dict[str, Any]:
        return {"points": msgspec.to_builtins(list(self._points)), "left": msgspec.to_builtins(self._left)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points.extend(convert_plain("health state", list[_Point], state["points"]))
        self._left = convert_plain("health state", list[_Point], state["left"])


def _doubts(points: Sequence[_Point]) -> dict[str, list[_Doubt]]:
    """Return the raters that rise, and for each those that doubt its gain."""
    names = sorted(points[-1].means)
    levels = {name: [point.means[name] for point in points if name in point.means] for name in names}
    slopes = {name: slope_t(values) or 0.0 for name, values in levels.items()}
    ends = min(_END_POINTS, len(points) // 3)
    found: dict[str, list[_Doubt]] = {}
    for x in names:
        if slopes[x] <= _GAIN_T:
            continue
        gain = fmean(levels[x][-ends:]) - fmean(levels[x][:ends])
        for y in names:
            if y == x:
                continue
            before = _pair(points[:ends], x, y)
            loss = _lost_agreement(before, [_pair(points[i : i + ends], x, y) for i in range(ends, len(points), ends)])
            if gain <= 0 or loss is None:
                continue
            xy, xx, _ = before.beside_length()
            room = _ROOM * max(0.0, 1 - fmean(levels[y][:ends]))
            share = _CONFIRMED * min(xy / xx, room / gain)
            t = slope_t([point.means[y] - share * point.means[x] for point in points if {x, y} <= point.means.keys()])
            if t is not None and t < _CONTRADICTING_T:
                r_before, r_after = loss
                falls = slopes[y] < _FALLING_T and r_after < (1 - _MOSTLY_LOST) * r_before
                found.setdefault(x, []).append(_Doubt(y, t, r_before, r_after, slopes[y] < _SINKING_T, falls))
    return found


def _lost_agreement(before: _Sums, later: Sequence[_Sums]) -> tuple[float, float] | None:
    """Return the correlation before, and the lowest one later, if it was good and fell by much and more than chance."""
    r = correlation(*before.beside_length())
    both_rate = [one for one in later if one.n]
    if r is None or r < _MIN_AGREEMENT or not both_rate:
        return None
    lowest, error = min((correlation(*one.beside_length()) or 0.0, _error(one)) for one in both_rate)
    if r - lowest < max(_LOST * r, _SURE_ERRORS * math.hypot(_error(before), error)):
        return None
    return r, lowest


def _error(sums: _Sums) -> float:
    """Return the standard error of a correlation, which is 0 if one of the two does not vary."""
    r = correlation(*sums.beside_length()) or 0.0
    return (1 - r * r) / math.sqrt(max(1, sums.n))


def _pair(points: Sequence[_Point], x: str, y: str) -> _Sums:
    """Return the sums of a pair over all points."""
    key = f"{min(x, y)} {max(x, y)}"
    sums = sum((point.pairs[key] for point in points if key in point.pairs), _Sums())
    return sums if x < y else sums.turned()


def _group_point(score: GroupScore) -> _Point:
    """Return what a group says. `n` of a pair counts the samples with both, less one for their mean."""
    point = _Point(mean(score.scores), {}, {})
    logs = [math.log(max(1, length)) for length in score.lengths] or [0.0] * len(score.scores)
    for name, column in score.ratings.items():
        known = list(finite(column))
        if known:
            point.means[name] = math.fsum(known) / len(known)
    for x, y in combinations(sorted(point.means)[:_MAX_RATERS], 2):
        rows = [
            (own, other, log)
            for own, other, log in zip(score.ratings[x], score.ratings[y], logs, strict=True)
            if is_number(own) and is_number(other)
        ]
        if len(rows) < 2:
            continue
        middles = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        sums = [0.0] * 6
        for row in rows:
            a, b, c = (value - middle for value, middle in zip(row, middles, strict=True))
            for i, product in enumerate((a * b, a * a, b * b, a * c, b * c, c * c)):
                sums[i] += product
        point.pairs[f"{x} {y}"] = _Sums(len(rows) - 1, *sums)
    return point


def _together(groups: Sequence[_Point]) -> _Point:
    """Return one point of all groups."""
    point = _Point(mean(group.score for group in groups), {}, {})
    for name in sorted({name for group in groups for name in group.means}):
        point.means[name] = fmean(group.means[name] for group in groups if name in group.means)
    for key in sorted({key for group in groups for key in group.pairs}):
        point.pairs[key] = sum((group.pairs[key] for group in groups if key in group.pairs), _Sums())
    return point


def _named(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(sorted(names))[:200]
