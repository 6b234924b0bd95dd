"""Implements the self-evolving curriculum (arXiv:2505.14970).

It is a bandit; its arms are difficulty bins within each skill. An arm's reward is the mean size of a group's
standardised advantages, 2 sqrt(y (1-y)) for binary rewards with mean success y; its value moves towards it by the
learning rate. Arms are drawn by softmax(value / temperature), items evenly within an arm.
"""

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.schedules import bins_by_rank
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy

__all__ = ["SelfEvolving"]


class SelfEvolving(Strategy):
    """Bandit over (skill, difficulty bin). Values start at 1, the highest reward, so that every arm is tried."""

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        ranks, skill = items.ranks(), items.skill_index
        self._arm = np.empty(items.count, np.int64)
        first = 0
        for index in np.unique(skill):
            here = np.flatnonzero(skill == index)
            bins = min(config.bins, len(here))
            within = np.empty(len(here), np.int64)
            within[np.argsort(ranks[here])] = np.arange(len(here))
            self._arm[here] = first + bins_by_rank(within, bins)
            first += bins
        self._size = np.bincount(self._arm, minlength=first)
        self._value = np.ones(first)

    def weights(self) -> NDArray[np.float64]:
        """Spread each arm's probability evenly over its items."""
        odds = np.exp((self._value - self._value.max()) / self.config.temperature)
        weights: NDArray[np.float64] = (odds / odds.sum() / self._size)[self._arm]
        return weights

    def learn(self, feedback: ItemFeedback, success: float, discount: float) -> None:
        """Move the arm's value."""
        arm = self._arm[feedback.item]
        reward = 2.0 * math.sqrt(success * (1.0 - success))
        self._value[arm] += self.config.learning_rate * discount * (reward - self._value[arm])

    def array_index(self, name: str) -> Literal["item", "skill"] | None:
        """Return None: there is an entry for each arm."""
        return None

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arms' values."""
        return {"value": self._value}
