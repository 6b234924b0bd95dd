"""grpo: distance from the group's mean in standard deviations (DeepSeekMath, arXiv:2402.03300)."""

import math

from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup

__all__ = ["Grpo"]


class Grpo(Estimator):
    """(r - mean) / s."""

    name = "grpo"
    zero_mean = True
    divides = True

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the standardized rewards."""
        return [c / group.divisor for c in group.centred]

    def bound(self, group: RewardGroup) -> float:
        """Return the advantage of a single deviating sample."""
        return (group.n - 1) / math.sqrt(group.n)
