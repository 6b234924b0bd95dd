"""pass@k: the best sample alone gets its lead over the second, in standard deviations."""

import math

from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup

__all__ = ["PassAtK"]


class PassAtK(Estimator):
    """(best - second) / s for the best sample, 0 for the others."""

    name = "pass@k"

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the lead of the best sample."""
        lead, best = self.spread(group), max(group.rewards)
        return [lead / group.divisor if x == best else 0.0 for x in group.rewards]

    def bound(self, group: RewardGroup) -> float:
        """Return the advantage of a single deviating sample."""
        return math.sqrt(group.n)

    def spread(self, group: RewardGroup) -> float:
        """Return how far the best sample is ahead of the second."""
        second, best = sorted(group.rewards)[-2:]
        return best - second
