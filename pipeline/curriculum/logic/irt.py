"""Online item response theory, the default strategy.

Ability A_k of skill k against difficulty D_i of item i, in logits: p = sigmoid(A_k - D_i). D_i is known with variance
V_i. A result with mean success y over n samples, which count as m = discount * n for their age, moves D_i to where
(D - D_i)^2 / 2V_i - m (y ln p + (1-y) ln(1-p)) is lowest, and V_i to 1 / (1/V_i + m p(1-p)) + wander^2 (Laplace's
approximation), no more than at the start; A_k += discount * ability rate * (y - p). One result moves the ability, and
with it the weight of every item of the skill.

An item's weight is (4q(1-q))^sharpness / (1 + d^2)^fade. Expected success q = sigmoid((A_k - D_i) / sqrt(1 + pi V_i/8))
(MacKay 1992) stays nearer to even odds the less is known. d is how far D_i - DOUBT sqrt(V_i) lies above the lowest
D_i + DOUBT sqrt(V_i) there ever was with V_i <= FIRM^2: by how much more than its error explains the item got harder. A
sound item gets easier for a learner that learns, whereas one that a coin decides, or a wrong label, seems to get harder
as the ability rises. A share `explore` goes to items by the time since they were last seen, faded ones among them.

The error of D_i is in both since a group is a small sample: taken at its word, one lucky or unlucky result would keep a
sound item from being drawn for long (`starved` in tests/benchmarks/curriculum_simulator.py).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.strategy import Feedback, Items, Strategy, finite_sigmoid, sigmoid

__all__ = ["OnlineIRT"]

DOUBT = 0.5
"""Standard errors by which both estimates are moved towards each other before an item counts as harder."""
FIRM = 1.0
"""Largest standard error, in logits, of a difficulty that later ones are compared with."""


class OnlineIRT(Strategy):
    """State: per item difficulty, its variance and reference float64 [N] (the lowest upper bound of the difficulty so
    far, infinite before there is one), the observation at which it was last seen int64 [N], 0 for never; per skill
    the ability float64 [K].
    """

    def __init__(self, items: Items, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._skill = items.skill_index
        self._difficulty, deviation = _prior(items, config)
        self._most = deviation**2
        self._variance = np.full(items.count, self._most)
        self._reference = np.full(items.count, np.inf)
        self._seen = np.zeros(items.count, np.int64)
        self._ability = np.zeros(len(items.skills))

    def weights(self) -> NDArray[np.float64]:
        """Return (1 - explore) * the normalised weight + explore * the normalised time since an item was seen."""
        q = self.success()
        harder = np.maximum(0.0, self._difficulty - DOUBT * np.sqrt(self._variance) - self._reference)
        # q(1-q) is at most 1/4; the factor 4 keeps its power from underflowing for every item at once.
        weight = (4.0 * q * (1.0 - q)) ** self.config.sharpness / (1.0 + harder**2) ** self.config.fade
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
        """Return the expected success float64 [N] of every item, under the error of its difficulty."""
        return sigmoid((self._ability[self._skill] - self._difficulty) / np.sqrt(1.0 + math.pi / 8.0 * self._variance))

    def learn(self, feedback: Feedback, success: float, discount: float) -> None:
        """Move the item's difficulty and its skill's ability."""
        i = feedback.item
        k = self._skill[i]
        self._seen[i] = self.observations
        ability, evidence = float(self._ability[k]), discount * feedback.n
        variance = min(float(self._variance[i]), self._most)
        error = success - finite_sigmoid(ability - float(self._difficulty[i]))
        difficulty = _most_likely(float(self._difficulty[i]), variance, ability, success, evidence)
        p = finite_sigmoid(ability - difficulty)
        variance = 1.0 / (1.0 / variance + evidence * p * (1.0 - p)) + self.config.wander**2
        self._difficulty[i] = difficulty
        self._variance[i] = min(variance, self._most)
        self._ability[k] += discount * self.config.ability_rate * error
        if self._variance[i] <= FIRM**2:
            self._reference[i] = min(self._reference[i], difficulty + DOUBT * math.sqrt(self._variance[i]))

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state."""
        return {
            "difficulty": self._difficulty,
            "variance": self._variance,
            "reference": self._reference,
            "seen": self._seen,
            "ability": self._ability,
        }

    def misfit(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        """Say so, too, of a variance that is not above 0 and of times below 0; a reference is infinite at first."""
        if not (arrays["variance"] > 0).all():
            return "variance"
        if (arrays["seen"] < 0).any():
            return "seen"
        reference = arrays["reference"]
        return super().misfit({**arrays, "reference": np.where(np.isposinf(reference), 0.0, reference)})

    def figures(self) -> dict[str, float]:
        """Return the abilities, the mean difficulty of a draw, and the share of items seen."""
        weights = self.weights()
        named = {f"ability/{name or 'all'}": float(a) for name, a in zip(self.items.skills, self._ability, strict=True)}
        return {
            **named,
            "drawn_difficulty": float((weights * self._difficulty).sum() / weights.sum()),
            "drawn_success": float((weights * self.success()).sum() / weights.sum()),
            "seen_share": float((self._seen > 0).mean()),
        }


def _prior(items: Items, config: CurriculumConfig) -> tuple[NDArray[np.float64], float]:
    """Return what is believed of the difficulties before any result, float64 [N], and its standard error, in logits."""
    if items.difficulty is not None:
        centred = np.asarray(items.difficulty, np.float64) - np.mean(items.difficulty)
        deviation = float(np.std(centred))
        if deviation > 0:
            return centred * (config.prior_deviation / deviation), config.prior_deviation
    return np.zeros(items.count), config.deviation


def _most_likely(difficulty: float, variance: float, ability: float, success: float, evidence: float) -> float:
    """Return the difficulty of highest posterior density: the root of an increasing function, by bisection."""
    near = difficulty
    far = difficulty - variance * evidence * (success - finite_sigmoid(ability - difficulty))  # as if p stayed as it is
    for _ in range(50):
        middle = 0.5 * (near + far)
        slope = (middle - difficulty) / variance + evidence * (success - finite_sigmoid(ability - middle))
        if (slope > 0) == (far > near):
            far = middle
        else:
            near = middle
    return near
