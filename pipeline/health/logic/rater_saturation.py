"""Checks for a rater that comes to say its best of nearly every sample."""

from collections.abc import Mapping
from typing import Any

from lachesis.pipeline.health.logic.check import START_WINDOWS, Check, CheckResult, HealthWindow, finite, mean
from lachesis.schemas.values import convert_plain

__all__ = ["RaterSaturation"]


class RaterSaturation(Check):
    """A rater that comes to say its best of > .9 of the samples, where it did of < .5 in the first two windows, while
    no other one does: it no longer distinguishes samples. That only informs: learned form looks the same, and a gain
    that others do not confirm has a check of its own. Ratings are calibrated to [0, 1]; within .01 of 1 is the best."""

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
        if len(self._start) < START_WINDOWS:
            self._start.append(shares)
            return CheckResult("idle", reason="the first windows are what later ones are compared with")
        usual = {name: mean(start.get(name) for start in self._start) for name in shares}
        worst = max(shares, key=lambda name: shares[name])
        alone = all(share < 0.5 for name, share in shares.items() if name != worst)
        if shares[worst] > 0.9 and alone and (usual[worst] or 0.0) < 0.5:
            reason = f"{worst} says its best of {shares[worst]:.0%} of the samples, no other rater does: look at them"
            return CheckResult("inform", shares[worst], 0.9, reason, window.newest)
        return CheckResult("ok", shares[worst], 0.9)

    def state_dict(self) -> dict[str, Any]:
        return {"start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = convert_plain("health state", list[dict[str, float]], state["start"])
