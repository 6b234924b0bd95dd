"""rloo: reward minus the mean of the other samples (arXiv:2402.14740)."""

from lachesis.pipeline.normalizer.estimators.centred import Centred
from lachesis.pipeline.normalizer.estimators.estimator import RewardGroup

__all__ = ["Rloo"]


class Rloo(Centred):
    """n / (n - 1) (r - mean)."""

    name = "rloo"

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the distances from the mean of the others."""
        return [c * group.n / (group.n - 1) for c in group.centred]
