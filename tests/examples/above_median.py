"""An estimator: how far each reward lies above the group's median, times `scale`."""

import statistics

from lachesis import RewardGroup, estimator


@estimator(version="1")
def above_median(group: RewardGroup, *, scale: float = 1.0) -> list[float]:
    middle = statistics.median(group.rewards)
    return [scale * (reward - middle) for reward in group.rewards]
