"""Checks that the advantages of each complete group have the estimator's mean and bound."""

import math
from collections.abc import Sequence

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, graded
from lachesis.pipeline.health.logic.trends import scaled_deviations
from lachesis.pipeline.normalizer.estimators.loader import builtin_estimator
from lachesis.schemas.annotations import GroupReward

__all__ = ["AdvantageCheck"]


class AdvantageCheck(Check):
    """A group whose mean is beyond 1e-6 of its largest advantage, where the estimator centres, or with one beyond the
    estimator's bound ((n-1)/sqrt(n) of grpo with a deviation of n-1; the range of rewards where there is no divisor)
    halts. Skewness of all advantages, |m3 / m2^1.5| > 3, informs; in groups of n samples, of which one succeeds at a
    hard task, it is (n - 2) / sqrt(n - 1), so where that is more, more than that."""

    name = "advantages"

    def evaluate(self, window: HealthWindow) -> CheckResult:
        trained = [reward for reward in window.rewards if reward.trains]
        values = [value for reward in trained for value in _finite(reward.advantages)]
        if not values:
            return CheckResult("idle", reason="no advantages")
        broken = [reward.group for reward in trained if not _holds(reward, window.estimator)]
        if broken:
            reason = (
                f"advantages of {len(broken)} groups break the bounds of {window.estimator}: a bug, whatever the data"
            )
            return CheckResult("halt", float(len(broken)), 0.0, reason, broken[:MAX_EXAMPLES])
        skew = _skewness(values)
        n = max(2.0, len(values) / len(trained))
        severity, threshold = graded(abs(skew), [(max(3.0, 1.001 * (n - 2) / math.sqrt(n - 1)), "inform")])
        reason = "" if severity == "ok" else f"few samples carry the gradient: skewness {skew:.1f}"
        examples = sorted(trained, key=lambda reward: -max(map(abs, _finite(reward.advantages)), default=0.0))[
            :MAX_EXAMPLES
        ]
        return CheckResult(
            severity, abs(skew), threshold, reason, [reward.group for reward in examples] if reason else ()
        )


def _holds(reward: GroupReward, estimator: str) -> bool:
    values = _finite(reward.advantages)
    if len(values) != sum(value is not None for value in reward.advantages):
        return False
    if not values:
        return True  # nothing is said of any sample
    most, n = max(map(abs, values)), len(values)
    kind = builtin_estimator(estimator)  # a user's own promises nothing but numbers
    if kind is None:
        return True
    if kind.zero_mean and most and abs(math.fsum(value / most for value in values)) > 1e-6 * n:
        return False
    bonus = reward.shaping or [0.0] * len(reward.rewards)
    rewards = [r + (b or 0.0) for r, b in zip(reward.rewards, bonus, strict=True) if r is not None and math.isfinite(r)]
    if kind.within_range and rewards:
        return most <= (max(rewards) - min(rewards)) * (1 + 1e-6)
    return estimator != "grpo" or most <= (n - 1) / math.sqrt(n) * (1 + 1e-6)


def _finite(advantages: Sequence[float | None]) -> list[float]:
    """Return the advantages that are numbers: on the wire they are at most 1e100."""
    return [value for value in advantages if value is not None and math.isfinite(value)]


def _skewness(values: Sequence[float]) -> float:
    away = scaled_deviations(values)
    second = math.fsum(value**2 for value in away) / len(away)
    third = math.fsum(value**3 for value in away) / len(away)
    return third / second**1.5 if second else 0.0
