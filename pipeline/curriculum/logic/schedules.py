"""Strategies that follow a schedule or the latest result alone: easy-first, competence, pools, epoch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy
from lachesis.schemas.errors import ConfigError

__all__ = ["Competence", "EasyFirst", "Epoch", "Pools", "bins_by_rank"]


def bins_by_rank(ranks: NDArray[np.int64], bins: int) -> NDArray[np.int64]:
    """int64 [N]: bin 0 (easiest) to bins-1; sizes differ by at most one."""
    return ranks * bins // len(ranks)


def _ranks_by_difficulty(items: ItemPool, strategy: str) -> NDArray[np.int64]:
    """Return `items.ranks()`. Raises `ConfigError` where nothing says which items are easier than others."""
    if items.difficulty is None or (items.difficulty == items.difficulty[0]).all():
        raise ConfigError(
            f"curriculum.strategy {strategy!r} goes from easy to hard, and the environment's items have no difficulty "
            "that differs: give its tasks a `difficulty`, or use irt, sec, pools or uniform."
        )
    return items.ranks()


class EasyFirst(Strategy):
    """Bin i of n is drawn with (1-t) e^(-2i/(n-1)) / sum + t/n, t = policy step / total steps: from easy to even."""

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        count = min(config.bins, items.count)
        self._bin = bins_by_rank(_ranks_by_difficulty(items, "easy_first"), count)
        self._size = np.bincount(self._bin, minlength=count)
        easy = np.exp(-2.0 * np.arange(count) / max(count - 1, 1))
        self._easy = easy / easy.sum()

    def weights(self) -> NDArray[np.float64]:
        """Spread each bin's share evenly over its items."""
        t = min(1.0, self.step / self.config.total_steps)
        share = (1 - t) * self._easy + t / len(self._easy)
        weights: NDArray[np.float64] = (share / self._size)[self._bin]
        return weights


class Competence(Strategy):
    """Even over the items whose difficulty quantile is at most c(t) = min(1, sqrt(t (1-c0^2)/T + c0^2))
    (Platanios et al. 2019, arXiv:1903.09848).
    """

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._ranks = _ranks_by_difficulty(items, "competence")

    @property
    def competence(self) -> float:
        """c at the newest policy step."""
        c0 = self.config.initial_competence
        return float(min(1.0, np.sqrt(self.step * (1 - c0**2) / self.config.total_steps + c0**2)))

    def weights(self) -> NDArray[np.float64]:
        """1 for items within reach, at least the easiest one, else 0."""
        reach = max(1, int(self.competence * self.items.count))
        return (self._ranks < reach).astype(np.float64)

    def figures(self) -> dict[str, float]:
        """Return the competence."""
        return {"competence": self.competence}


class Pools(Strategy):
    """By an item's latest mean success: 1 above 0.25 and up to 0.75, and while unseen; else 0.2."""

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._latest = np.full(items.count, 0.5)

    def weights(self) -> NDArray[np.float64]:
        """Return the pools' weights."""
        middle = (self._latest > 0.25) & (self._latest <= 0.75)
        return np.where(middle, 1.0, 0.2)

    def learn(self, feedback: ItemFeedback, success: float, discount: float) -> None:
        """Remember the latest result."""
        self._latest[feedback.item] = success

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the latest results, 0.5 where there is none."""
        return {"latest": self._latest}


class Epoch(Strategy):
    """Even weights: the environments take every item once an epoch, in an order of their own."""
