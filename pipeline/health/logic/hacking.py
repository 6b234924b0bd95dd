"""Checks for reward hacking.

They find a reward that rises while the raters diverge, and the rater that is at odds.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, graded, is_number, mean
from lachesis.pipeline.health.logic.drift import BLOCK
from lachesis.pipeline.health.logic.trends import slope_t
from lachesis.pipeline.scorer.logic.intervals import MIN_GROUPS, alphas_without_each, jackknife_error, student
from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha, RaterReliability
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["OverOptimisation", "RaterAtOdds"]

_SLOPE_BLOCKS = 50
"""Blocks of groups that slopes are taken over."""
_MIN_STEPS = 12
_AT_ODDS_FALSE_ALARMS = 0.01
"""Share of windows in which some rater of several alike is found at odds, at most."""


class OverOptimisation(Check):
    """The score rises while the raters part: slopes over the last 50 blocks of 16 groups, of the mean score, of the
    variance between raters within a sample, and of Krippendorff's alpha (Gao 2022, arXiv:2210.10760; Coste 2023).

    t of the score and t of the variance both > 2 inform. -t of alpha stands for the latter where it is more and the
    variance does not fall: alpha falls, too, when answers come to be alike. Only if more than half of the raters fall
    (t < -2), most of them do not find the answers better: that warns, and quarantines if both are > 4, or if it lasts.
    One rater that falls is at odds by design: of brevity, say, where thinking longer helps.
    """

    name = "over_optimisation"

    def __init__(self) -> None:
        self._points: deque[dict[str, float | None]] = deque(maxlen=_SLOPE_BLOCKS)
        self._next_block: list[tuple[float, list[dict[str, float]]]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        for score in window.scores:
            units = [unit for unit in _units(score) if len(unit) > 1]
            mean_score = mean(score.scores)
            if units and mean_score is not None:
                self._next_block.append((mean_score, units))
        while len(self._next_block) >= BLOCK:
            self._points.append(_point(self._next_block[:BLOCK]))
            del self._next_block[:BLOCK]
        if len(self._points) < _MIN_STEPS:
            return CheckResult("idle", reason="too few groups with two raters or more")
        slopes = {name: slope_t([y for point in self._points if (y := point.get(name)) is not None])
                  for name in self._points[-1]}  # fmt: skip
        rising, parting, agreeing = (slopes.pop(name, None) or 0.0 for name in ("score", "variance", "alpha"))
        t = min(rising, max(parting, -agreeing if parting >= 0 else 0.0))
        severity, threshold = graded(t, [(2.0, "warn"), (4.0, "quarantine")])
        raters = {name.removeprefix("rater "): slope for name, slope in sorted(slopes.items()) if slope is not None}
        rising_raters = [name for name, slope in raters.items() if slope > 2]
        falling_raters = [name for name, slope in raters.items() if slope < -2]
        if severity == "ok":
            return CheckResult("ok", t, threshold)
        parted = f"variance t = {parting:.1f}, alpha t = {agreeing:.1f}"
        reason = f"the score rises (t = {rising:.1f}) while the raters part ({parted})"
        for names, what in ((rising_raters, "rising raters"), (falling_raters, "falling raters")):
            reason += f"; {what}: {', '.join(names)[:200]}" if names else ""
        if 2 * len(falling_raters) <= len(raters):
            return CheckResult("inform", t, 2.0, reason, _most_at_odds(window))
        return CheckResult(severity, t, threshold, reason, _most_at_odds(window), grows=True)

    def state_dict(self) -> dict[str, Any]:
        return {"points": list(self._points), "left": self._next_block}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points.extend(convert_plain("health state", list[dict[str, float | None]], state["points"]))
        self._next_block = convert_plain("health state", list[tuple[float, list[dict[str, float]]]], state["left"])


class RaterAtOdds(Check):
    """A rater without which the others agree better: alpha without it exceeds alpha by more than chance would have it.

    That informs, and says whether it is more at odds than in the first two windows by more than chance: a rater of
    another kind is at odds by design, and learning changes by how much. Drop the rater if the quorum holds; a person
    decides.

    The error of a difference of alphas is that of a jackknife which leaves out one group at a time, since the samples
    of a group are alike. Raters that are alike are found more at odds by chance in at most 1 % of windows, whatever
    their number: the thresholds are Student's quantiles at that rate over the number of raters. Measured: 0 to 0.8 % of
    windows at correlations of 0, .3 and .7 within a group, of truths and errors, with 3 and 4 raters, normal, binary
    and heavy tails.
    """

    name = "rater_at_odds"

    def __init__(self) -> None:
        self._start: list[dict[str, float]] = []

    def evaluate(self, window: HealthWindow) -> CheckResult:
        groups = [units for score in window.scores if (units := [u for u in _units(score) if len(u) > 1])]
        raters = sorted({name for units in groups for unit in units for name in unit})
        if len(raters) < 3:
            return CheckResult("idle", reason="fewer than three raters")
        if len(groups) < MIN_GROUPS:
            return CheckResult("idle", reason=f"fewer than {MIN_GROUPS} groups whose samples have two ratings")
        gains, errors = _gains(groups, raters)
        if not gains:
            return CheckResult("idle", reason="the ratings do not vary, so agreement is undefined")
        if len(self._start) < 2:
            self._start.append(gains)
        usual = {name: mean(found.get(name) for found in self._start) or 0.0 for name in gains}
        reach = student(1 - _AT_ODDS_FALSE_ALARMS / len(gains), len(groups) - 1)
        beyond = {name: gain - reach * errors[name] for name, gain in gains.items()}
        grown = {name: gain - usual[name] - reach * math.sqrt(1.5) * errors[name] for name, gain in gains.items()}
        worst = max(gains, key=lambda name: min(beyond[name], grown[name]))
        if beyond[worst] > 0 and grown[worst] > 0:
            reason = f"the others agree better without {worst} (alpha +{gains[worst]:.3f}), more than they did at first"
            return CheckResult("inform", gains[worst], gains[worst] - grown[worst], reason, _most_at_odds(window))
        worst = max(gains, key=lambda name: beyond[name])
        if beyond[worst] > 0:
            reason = f"the others agree better without {worst}, as from the start"
            return CheckResult("inform", gains[worst], reach * errors[worst], reason, _most_at_odds(window))
        return CheckResult("ok", gains[worst], reach * errors[worst])

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = convert_plain("health state", list[dict[str, float]], state["start"])


def _units(score: GroupScore) -> list[dict[str, float]]:
    """Return what each sample's raters said."""
    return [{rater: rating for rater, column in score.ratings.items()
             if is_number(rating := column[i])}
            for i in range(len(score.scores))]  # fmt: skip


def _variance(unit: Mapping[str, float]) -> float:
    centre = sum(unit.values()) / len(unit)
    return sum((rating - centre) ** 2 for rating in unit.values()) / len(unit)


def _point(groups: Sequence[tuple[float, Sequence[Mapping[str, float]]]]) -> dict[str, float | None]:
    """Return one observation: score, variance and alpha, and each rater's mean under "rater NAME"."""
    units = [unit for _, found in groups for unit in found]
    alpha = IntervalAlpha()
    by_rater: dict[str, list[float]] = {}
    for unit in units:
        alpha.add_unit(list(unit.values()))
        for name, rating in unit.items():
            by_rater.setdefault(name, []).append(rating)
    return {
        "score": fmean(score for score, _ in groups),
        "variance": fmean(_variance(unit) for unit in units),
        "alpha": alpha.alpha().value,
        **{f"rater {name}": fmean(values) for name, values in by_rater.items()},
    }


def _gains(
    groups: Sequence[Sequence[Mapping[str, float]]], raters: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return by how much alpha rises without each rater, where that is defined, and its jackknife standard error."""
    whole = RaterReliability(raters)
    parts = []
    for units in groups:
        part = RaterReliability(raters)
        for unit in units:
            part.add_unit(unit)
        parts.append(part)
        whole.merge(part)
    together = whole.whole.alpha().value
    if together is None:
        return {}, {}
    folds = alphas_without_each([part.whole for part in parts])
    gains, errors = {}, {}
    for name, alpha in whole.leave_one_out().items():
        without = alphas_without_each([part.without[name] for part in parts])
        error = jackknife_error(
            [None if x is None or y is None else y - x for x, y in zip(folds, without, strict=True)]
        )
        if alpha.value is not None and error is not None:
            gains[name], errors[name] = alpha.value - together, error
    return gains, errors


def _most_at_odds(window: HealthWindow) -> list[str]:
    """Return the groups in which the raters part most."""

    def odds(score: GroupScore) -> float:
        return mean(_variance(unit) for unit in _units(score) if unit) or 0.0

    return [score.group for score in sorted(window.scores, key=odds, reverse=True)[:MAX_EXAMPLES]]
