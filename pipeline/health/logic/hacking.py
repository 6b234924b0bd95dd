"""Checks for reward hacking.

Is the reward paid for length, does it rise while the raters part, who is at odds?
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, graded, mean
from lachesis.pipeline.health.logic.drift import BLOCK
from lachesis.pipeline.health.logic.trends import correlation, fisher_z, slope_t
from lachesis.pipeline.scoring.logic.krippendorff import IntervalAlpha, RaterReliability
from lachesis.schemas.annotations import GroupScore

__all__ = ["LengthHacking", "OverOptimisation", "RaterAtOdds"]

_SLOPE_BLOCKS = 50
"""Blocks of groups that slopes are taken over."""
_MIN_STEPS = 12
_FOLDS = 16


class LengthHacking(Check):
    """Correlation r of score and length, both centred within their group, pooled over the window. Fisher's z > 3.3
    (two-sided .001) with |r| > .3 warns; r > .6 while mean lengths rise over eight windows (t > 2) quarantines."""

    name = "length_hacking"

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=8)

    def evaluate(self, window: HealthWindow) -> CheckResult:
        xy = xx = yy = 0.0
        degrees, lengths = 0, []
        for score in window.scores:
            pairs = [(value, length) for value, length in zip(score.scores, score.lengths, strict=True)
                     if value is not None and math.isfinite(value)]  # fmt: skip
            lengths += [length for _, length in pairs]
            if len(pairs) < 2:
                continue
            x, y = fmean(value for value, _ in pairs), fmean(length for _, length in pairs)
            degrees += len(pairs) - 1
            xy += sum((value - x) * (length - y) for value, length in pairs)
            xx += sum((value - x) ** 2 for value, _ in pairs)
            yy += sum((length - y) ** 2 for _, length in pairs)
        if not lengths:
            return CheckResult("idle", reason="no scores")
        self._lengths.append(fmean(lengths))
        r = correlation(xy, xx, yy)
        if r is None:
            return CheckResult("idle", reason="scores or lengths do not differ within groups")
        if abs(r) <= 0.3 or abs(fisher_z(r, degrees)) <= 3.3:
            return CheckResult("ok", abs(r), 0.3)
        longest = sorted(window.scores, key=lambda score: -max(score.lengths))[:MAX_EXAMPLES]
        examples = [score.group for score in longest]
        rising = slope_t(self._lengths)
        if r > 0.6 and rising is not None and rising > 2:
            grown = f"{self._lengths[0]:.0f} -> {self._lengths[-1]:.0f} tokens"
            reason = f"the score follows length (r = {r:.2f}), and answers grow: {grown}"
            return CheckResult("quarantine", r, 0.6, reason, examples)
        return CheckResult("warn", abs(r), 0.3, f"score and length go together within groups, r = {r:.2f}", examples)

    def state_dict(self) -> dict[str, Any]:
        return {"lengths": list(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lengths.extend(float(value) for value in state["lengths"])


class OverOptimisation(Check):
    """The score rises while the raters part: slopes over the last 50 blocks of 16 groups, of the mean score, of the
    variance between raters within a sample, and of Krippendorff's alpha (Gao 2022, arXiv:2210.10760; Coste 2023).

    t of the score and t of the variance both > 2 warn. -t of alpha stands for the latter where it is more and the
    variance does not fall: alpha falls, too, when answers come to be alike. When as many raters fall (t < -2) as rise
    (t > 2) or more, most of them do not find the answers better: then both > 4 quarantines, and a warning that lasts
    does. One rater that falls while the others rise is at odds by design: of brevity, say, where thinking longer helps.
    """

    name = "over_optimisation"

    def __init__(self) -> None:
        self._points: deque[dict[str, float | None]] = deque(maxlen=_SLOPE_BLOCKS)
        self._left: list[tuple[float, list[dict[str, float]]]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        for score in window.scores:
            units = [unit for unit in _units(score) if len(unit) > 1]
            value = mean(score.scores)
            if units and value is not None:
                self._left.append((value, units))
        while len(self._left) >= BLOCK:
            self._points.append(_point(self._left[:BLOCK]))
            del self._left[:BLOCK]
        if len(self._points) < _MIN_STEPS:
            return CheckResult("idle", reason="too few groups with two raters or more")
        slopes = {name: slope_t([value for point in self._points if (value := point.get(name)) is not None])
                  for name in self._points[-1]}  # fmt: skip
        rising, parting, agreeing = (slopes.pop(name, None) or 0.0 for name in ("score", "variance", "alpha"))
        value = min(rising, max(parting, -agreeing if parting >= 0 else 0.0))
        severity, threshold = graded(value, [(2.0, "warn"), (4.0, "quarantine")])
        falling = [name for name, t in slopes.items() if t is not None and t < -2]
        if severity == "ok":
            return CheckResult("ok", value, threshold)
        parted = f"variance t = {parting:.1f}, alpha t = {agreeing:.1f}"
        reason = f"the score rises (t = {rising:.1f}) while the raters part ({parted})"
        if not falling or len(falling) < sum(t is not None and t > 2 for t in slopes.values()):
            return CheckResult("warn", value, 2.0, reason, _most_at_odds(window))
        reason += f"; {', '.join(sorted(falling))[:200]} falls"
        return CheckResult(severity, value, threshold, reason, _most_at_odds(window), grows=True)

    def state_dict(self) -> dict[str, Any]:
        return {"points": list(self._points), "left": self._left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points.extend(state["points"])
        self._left = [(float(value), units) for value, units in state["left"]]


class RaterAtOdds(Check):
    """A rater without which the others agree better: alpha without it > alpha + 2 standard errors of the difference, by
    a jackknife over sixteen parts of the window. That informs: a rater of another kind is at odds by design. More so
    than in the first two windows, by 2 standard errors, warns. Drop the rater if the quorum holds; a person decides.
    """

    name = "rater_at_odds"

    def __init__(self) -> None:
        self._start: list[dict[str, float]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        units = [unit for score in window.scores for unit in _units(score) if len(unit) > 1]
        raters = sorted({name for unit in units for name in unit})
        if len(raters) < 3 or len(units) < 2 * _FOLDS:
            return CheckResult("idle", reason="fewer than three raters" if len(raters) < 3 else "too few rated samples")
        gains, errors = _gains(units, raters)
        if not gains:
            return CheckResult("idle", reason="the ratings do not vary, so agreement is undefined")
        if len(self._start) < 2:
            self._start.append(gains)
        usual = {name: mean(found.get(name) for found in self._start) or 0.0 for name in gains}
        grown = {name: gain - usual[name] - 2 * math.sqrt(1.5) * errors[name] for name, gain in gains.items()}
        worst = max(gains, key=lambda name: min(gains[name] - 2 * errors[name], grown[name]))
        if gains[worst] > 2 * errors[worst] and grown[worst] > 0:
            reason = f"the others agree better without {worst} (alpha +{gains[worst]:.3f}), more than they did at first"
            return CheckResult("warn", gains[worst], gains[worst] - grown[worst], reason, _most_at_odds(window))
        worst = max(gains, key=lambda name: gains[name] - 2 * errors[name])
        if gains[worst] > 2 * errors[worst]:
            reason = f"the others agree better without {worst}, as from the start"
            return CheckResult("inform", gains[worst], 2 * errors[worst], reason, _most_at_odds(window))
        return CheckResult("ok", gains[worst], 2 * errors[worst])

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = [dict(gains) for gains in state["start"]]


def _units(score: GroupScore) -> list[dict[str, float]]:
    """Return what each sample's raters said."""
    return [{name: value for name, column in score.ratings.items()
             if (value := column[i]) is not None and math.isfinite(value)}
            for i in range(len(score.scores))]  # fmt: skip


def _variance(unit: Mapping[str, float]) -> float:
    centre = sum(unit.values()) / len(unit)
    return sum((value - centre) ** 2 for value in unit.values()) / len(unit)


def _point(groups: Sequence[tuple[float, Sequence[Mapping[str, float]]]]) -> dict[str, float | None]:
    """Return one observation: score, variance and alpha, and each rater's mean under "rater NAME"."""
    units = [unit for _, found in groups for unit in found]
    alpha = IntervalAlpha()
    by_rater: dict[str, list[float]] = {}
    for unit in units:
        alpha.add_unit(list(unit.values()))
        for name, value in unit.items():
            by_rater.setdefault(name, []).append(value)
    return {
        "score": fmean(value for value, _ in groups),
        "variance": fmean(_variance(unit) for unit in units),
        "alpha": alpha.alpha().value,
        **{f"rater {name}": fmean(values) for name, values in by_rater.items()},
    }


def _gains(units: Sequence[Mapping[str, float]], raters: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return by how much alpha rises without each rater, where that is defined, and its jackknife standard error."""
    parts = [RaterReliability(raters) for _ in range(_FOLDS)]
    for k, unit in enumerate(units):
        parts[k % _FOLDS].add_unit(unit)
    whole = _rises(parts, raters)
    folds = [_rises([part for k, part in enumerate(parts) if k != i], raters) for i in range(_FOLDS)]
    errors = {}
    for name in whole:
        values = [fold[name] for fold in folds if name in fold]
        if len(values) == _FOLDS:
            errors[name] = math.sqrt((_FOLDS - 1) / _FOLDS * sum((value - fmean(values)) ** 2 for value in values))
    return {name: whole[name] for name in errors}, errors


def _rises(parts: Sequence[RaterReliability], raters: Sequence[str]) -> dict[str, float]:
    found = RaterReliability(raters)
    for part in parts:
        found.merge(part)
    whole = found.whole.alpha().value
    without = {name: alpha.value for name, alpha in found.leave_one_out().items()}
    return {} if whole is None else {name: value - whole for name, value in without.items() if value is not None}


def _most_at_odds(window: HealthWindow) -> list[str]:
    """Return the groups in which the raters part most."""

    def odds(score: GroupScore) -> float:
        return mean(_variance(unit) for unit in _units(score) if unit) or 0.0

    return [score.group for score in sorted(window.scores, key=odds, reverse=True)[:MAX_EXAMPLES]]
