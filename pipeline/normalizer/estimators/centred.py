"""centred: reward minus the group's mean."""

from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup

__all__ = ["Centred"]


class Centred(Estimator):
    """r - mean."""

    name = "centred"
    zero_mean = True
    within_range = True

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the distances from the mean."""
        return group.centred

    def bound(self, group: RewardGroup) -> float:
        """Return the range of the rewards."""
        return group.range
