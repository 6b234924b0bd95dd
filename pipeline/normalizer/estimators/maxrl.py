"""maxrl: distance from the group's mean in units of the mean, so a rare success counts for more."""

from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup
from lachesis.schemas.errors import DataError

__all__ = ["MaxRl"]


class MaxRl(Estimator):
    """(r - mean) / mean, for rewards of at least 0."""

    name = "maxrl"
    zero_mean = True

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the relative distances from the mean. Raises `DataError` on a negative reward."""
        if min(group.rewards) < 0:
            raise DataError(
                f"estimator maxrl needs rewards of at least 0, has {min(group.rewards)}; choose another or shift them."
            )
        return [c / group.mean if group.mean > 0 else 0.0 for c in group.centred]

    def bound(self, group: RewardGroup) -> float:
        """Return the advantage of a single success."""
        return float(group.n - 1)
