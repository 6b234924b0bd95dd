"""Online item response theory (Elo), the default strategy.

Ability A_k of skill k against difficulty D_i of item i, in logits: p = sigmoid(A_k - D_i). On a result with mean
success y, e = y - p: D_i -= max(floor, rate / sqrt(n_i)) e and A_k += ability rate * e, both scaled by the discount
for age. One result moves the ability, and with it the weight of every item of the skill. An item's weight is
(p (1-p))^sharpness / (1 + (D_i - D_ref)^2)^fade with D_ref the lowest difficulty it ever had. A sound item gets easier
for a learner that learns, whereas one that a coin decides, or a wrong label, seems to get harder as the ability rises;
without this its even odds would draw a fifth of all groups in simulation. A share `explore` goes to items by the time
since they were last seen, faded ones among them.

The first step is large, since most items are met once or twice: rate e for a whole group of n samples is the step of
maximum likelihood with rate = n.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.strategy import Feedback, Items, Strategy, finite_sigmoid, sigmoid

__all__ = ["OnlineIRT"]


class OnlineIRT(Strategy):
    """State: per item difficulty and reference float64 [N] (NaN before its first result), results int32 [N], the
    observation at which it was last seen int64 [N]; per skill the ability float64 [K].
    """

    def __init__(self, items: Items, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._skill = items.skill_index
        self._difficulty = _prior(items)
        self._reference = np.full(items.count, np.nan)
        self._results = np.zeros(items.count, np.int32)
        self._seen = np.zeros(items.count, np.int64)
        self._ability = np.zeros(len(items.skills))

    def weights(self) -> NDArray[np.float64]:
        """Return (1 - explore) * the normalised weight + explore * the normalised time since an item was seen."""
        p = self.success()
        drift = np.nan_to_num(np.maximum(0.0, self._difficulty - self._reference), nan=0.0)
        # p(1-p) is at most 1/4; the factor 4 keeps its power from underflowing for every item at once.
        weight = (4.0 * p * (1.0 - p)) ** self.config.sharpness / (1.0 + drift**2) ** self.config.fade
        unseen = (self.observations + 1.0) - self._seen
        explore = self.config.explore if weight.sum() > 0 else 1.0
        exploit = weight / weight.sum() if weight.sum() > 0 else weight
        total: NDArray[np.float64] = (1.0 - explore) * exploit + explore * unseen / unseen.sum()
        return total

    def learnability(self) -> float:
        """Return the expected 4p(1-p) of a draw, in [0, 1]."""
        p = self.success()
        weights = self.weights()
        return float((weights * 4.0 * p * (1.0 - p)).sum() / weights.sum())

    def success(self) -> NDArray[np.float64]:
        """Return the expected success float64 [N] of every item."""
        return sigmoid(self._ability[self._skill] - self._difficulty)

    def learn(self, feedback: Feedback, success: float, discount: float) -> None:
        """Move the item's difficulty and its skill's ability."""
        i = feedback.item
        k = self._skill[i]
        self._results[i] += 1
        self._seen[i] = self.observations
        error = success - finite_sigmoid(float(self._ability[k] - self._difficulty[i]))
        rate = max(self.config.item_rate_floor, self.config.item_rate / float(np.sqrt(self._results[i])))
        self._difficulty[i] -= discount * rate * error
        self._ability[k] += discount * self.config.ability_rate * error
        self._reference[i] = np.fmin(self._reference[i], self._difficulty[i])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state."""
        return {
            "difficulty": self._difficulty,
            "reference": self._reference,
            "results": self._results,
            "seen": self._seen,
            "ability": self._ability,
        }

    def misfit(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        """Say so, too, of counts below 0; a reference is NaN before it is set."""
        below = next((name for name in ("results", "seen") if (arrays[name] < 0).any()), None)
        return below or super().misfit({**arrays, "reference": np.nan_to_num(arrays["reference"], nan=0.0)})

    def figures(self) -> dict[str, float]:
        """Return the abilities, the mean difficulty of a draw, and the share of items seen."""
        weights = self.weights()
        named = {f"ability/{name or 'all'}": float(a) for name, a in zip(self.items.skills, self._ability, strict=True)}
        return {
            **named,
            "drawn_difficulty": float((weights * self._difficulty).sum() / weights.sum()),
            "drawn_success": float((weights * self.success()).sum() / weights.sum()),
            "seen_share": float((self._results > 0).mean()),
        }


def _prior(items: Items) -> NDArray[np.float64]:
    """Difficulties to start from, in logits: the prior brought to mean 0 and a deviation of one logit."""
    if items.difficulty is None:
        return np.zeros(items.count)
    centred = np.asarray(items.difficulty, np.float64) - np.mean(items.difficulty)
    deviation = float(np.std(centred))
    return centred / deviation if deviation > 0 else np.zeros(items.count)
