"""opo: reward minus the length-weighted mean, the baseline of least variance (arXiv:2505.23585)."""

import math

from lachesis.pipeline.normalizer.estimators.estimator import Estimator, RewardGroup
from lachesis.schemas.errors import DataError

__all__ = ["Opo"]


class Opo(Estimator):
    """r - (sum of r * length) / (sum of length)."""

    name = "opo"
    within_range = True

    def check(self, group: RewardGroup) -> None:
        """Raise `DataError` without usable lengths."""
        if group.lengths is None:
            raise DataError("estimator opo needs the length of each sample; they are missing, or of another number.")
        if any(length < 0 for length in group.lengths) or not sum(group.lengths):
            raise DataError(f"estimator opo needs lengths of at least 0, not all 0; has {group.lengths}.")

    def estimate(self, group: RewardGroup) -> list[float]:
        """Return the distances from the length-weighted mean."""
        lengths = group.lengths or []
        baseline = math.fsum(x * length for x, length in zip(group.rewards, lengths, strict=True)) / sum(lengths)
        return [x - baseline for x in group.rewards]

    def bound(self, group: RewardGroup) -> float:
        """Return the range of the rewards."""
        return group.range
