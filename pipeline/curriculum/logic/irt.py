"""Online item response theory, the default strategy.

Ability A_k of skill k against difficulty D_i of item i, in logits: p = sigmoid(A_k - D_i). The density of D_i is its
prior N(mean, deviation^2) times sigmoid(a - D)^s sigmoid(D - b)^f: s successes at the mean ability a, f failures at the
mean ability b. A result with mean success y over n samples, which count as m = discount * n for their age, multiplies
it by p^(m y) (1-p)^(m (1-y)). D_i is then taken to lie where this is highest, with the inverse of its curvature there
as variance V_i, and the result joins s, f and their mean abilities. So results that contradict each other weigh the
same in either order. The density is exact while the ability rests, and close while it moves. Since a difficulty may
wander, s and f are first divided by 1 + wander^2 I, where I = 1/V_i - 1/deviation^2 is their information: a random walk
takes as much from a normal posterior. Then A_k += discount * ability rate * (y - p). One result moves the ability, and
with it the weight of every item of the skill.

An item's weight is (r u)^sharpness times the probability that it is sound. u = 4q(1-q) / s is about what 4p(1-p) is
expected to be under the error of D_i, with q = sigmoid((A_k - D_i) / s) and s^2 = 1 + pi V_i/8 (MacKay 1992): the less
is known of an item, the nearer its estimate is to even odds, and the lower its weight compared to an item known to have
even odds.

An item is sound if its success follows the ability. It is not sound if chance decides it, with a constant success: one
half or, as likely, any other. Log odds compare all its results under either. A coin keeps its even odds, whereas a
learner that learns leaves sound items behind. One that learns nothing makes all items look like that, so the odds are
bounded: what is half solved stays above what is solved or hopeless. A share `explore` goes to items by the time since
they were last seen, those of chance among them.

Of an item that has no prior and was not seen yet, the difficulty is predicted from its prompt
(`logic/features.py`) if the pool knows it, with the error that predictions had so far.

A repeat may teach less than the first meeting, and a pool may be too large to be gone through more than once or twice:
there, coming back to the few items known to be half solved is worse than a pass without repeats. So r is 1 for an item
that was not seen yet, and for the others min(1, passes / first_pass)^3, where a pass is one result for each drawable
item. A small pool is soon past that.

The error of D_i is in both since a group is a small sample: taken at its word, one lucky or unlucky result would keep a
sound item from being drawn for long (`starved` in tests/benchmarks/curriculum_simulator.py).
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.features import DifficultyPredictor, is_precision
from lachesis.pipeline.curriculum.logic.posterior import Evidence, integrate
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, Strategy, finite_sigmoid, sigmoid
from lachesis.schemas.columns import as_bytes

__all__ = ["OnlineIRT"]

REPEAT_POWER = 3
"""How steeply repeats gain worth in the first passes, on top of `sharpness`."""
DECIDED_LOGITS = 3.0
"""Largest log odds of chance against a sound item, either way."""
_SQUARABLE = (1e-100, 1e100)
"""Magnitudes of which squares, and sums of them, are numbers other than 0."""
_EVIDENCE = ("passes", "passes_ability", "failures", "failures_ability")
"""The columns of the state that hold each item's `Evidence`, in its order."""
_PREDICTOR = ("feature_precision", "feature_pull", "feature_errors")
"""The arrays of the state that hold what was learned of the items' features."""
_MAX_COUNT = float(1 << 50)
"""Above any count of samples, which float64 still holds to the sample."""


class OnlineIRT(Strategy):
    """State: per item the difficulty and its variance, the evidence on it (see `Evidence`), the log odds of
    chance, and the successes and samples that they rest on float64 [N], the observation at which it was last seen
    int64 [N], 0 for never; per skill the ability float64 [K]. 80 bytes an item.
    """

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._skill = items.skill_index
        self._prior, self._deviation = _prior(items, config)
        self._difficulty = self._prior.copy()
        self._most = self._deviation**2
        self._variance = np.full(items.count, self._most)
        self._evidence = {name: np.zeros(items.count) for name in _EVIDENCE}
        odds = math.log(config.chance / (1.0 - config.chance)) if config.chance else -DECIDED_LOGITS
        self._odds = np.full(items.count, min(max(odds, -DECIDED_LOGITS), DECIDED_LOGITS))
        self._successes = np.zeros(items.count)
        self._samples = np.zeros(items.count)
        self._seen = np.zeros(items.count, np.int64)
        self._ability = np.zeros(len(items.skills))
        is_given = items.difficulty is not None
        self._predictor = (
            None if is_given or items.features is None else DifficultyPredictor(items.features, self._most)
        )

    def weights(self) -> NDArray[np.float64]:
        """Return (1 - explore) * the normalised worth + explore * the normalised time since an item was seen."""
        weight, left_out = self.worth(), self.left_out()
        unseen = (self.observations + 1.0) - self._seen
        weight[left_out] = unseen[left_out] = 0.0  # never seen, they would take all of `explore`
        explore = self.config.explore if weight.sum() > 0 else 1.0
        exploit = weight / weight.sum() if weight.sum() > 0 else weight
        total: NDArray[np.float64] = (1.0 - explore) * exploit + explore * unseen / unseen.sum()
        return total

    def worth(self) -> NDArray[np.float64]:
        """Return what each item is worth drawing, float64 [N] at least 0, on any scale."""
        difficulty, stretch = self._expected()
        q = sigmoid((self._ability[self._skill] - difficulty) / stretch)
        # q(1-q) is at most 1/4; the factor 4 keeps its power from underflowing for every item at once.
        worth = 4.0 * q * (1.0 - q) / stretch * self._worth_of_repeats()
        weight: NDArray[np.float64] = worth**self.config.sharpness * (1.0 - self._chance())
        return weight

    def left_out(self) -> NDArray[np.int64]:
        """Return the items that are never drawn, int64 [n]."""
        return self.items.held_out

    def success(self) -> NDArray[np.float64]:
        """Return the expected success float64 [N] of every item, if sound, under the error of its difficulty."""
        difficulty, stretch = self._expected()
        return sigmoid((self._ability[self._skill] - difficulty) / stretch)

    def learn(self, feedback: ItemFeedback, success: float, discount: float) -> None:
        """Move the item's difficulty, its odds and its skill's ability."""
        i = feedback.item
        k = self._skill[i]
        is_predicted = self._predictor is not None and self._seen[i] == 0
        self._seen[i] = self.observations
        ability, samples = float(self._ability[k]), discount * feedback.n
        before, variance = float(self._difficulty[i]), min(float(self._variance[i]), self._most)
        if self._predictor is not None and is_predicted:
            before = self._predictor.predict_one(i)
        past = Evidence(*(float(column[i]) for column in self._evidence.values()))
        past = past.scaled(1.0 / (1.0 + self.config.wander**2 * max(1.0 / variance - 1.0 / self._most, 0.0)))
        new = Evidence(samples * success, ability, samples * (1.0 - success), ability)
        prior = float(self._prior[i]), self._deviation
        posterior = integrate(*prior, past, new)
        self._difficulty[i], self._variance[i] = posterior.mode, min(posterior.variance, self._most)
        if self._predictor is not None and is_predicted:
            self._predictor.learn(i, posterior.mode, posterior.variance)
        for column, value in zip(self._evidence.values(), past.merged(new), strict=True):
            column[i] = value
        self._ability[k] += discount * self.config.ability_rate * (success - finite_sigmoid(ability - before))
        if self.config.chance:
            sound = posterior.log_evidence - integrate(*prior, past).log_evidence
            odds = float(self._odds[i]) + self._count(i, success, samples) - sound
            self._odds[i] = min(max(odds, -DECIDED_LOGITS), DECIDED_LOGITS)

    def _count(self, i: int, success: float, evidence: float) -> float:
        """Count a result of item i; return its log likelihood after all before it, were the item's success constant."""
        before = _log_constant(float(self._successes[i]), float(self._samples[i]))
        self._successes[i] += evidence * success
        self._samples[i] += evidence
        return _log_constant(float(self._successes[i]), float(self._samples[i])) - before

    def _expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the difficulty float64 [N] of every item, predicted where it was not seen yet, and by how much its
        error flattens the item's success float64 [N], at least 1.
        """
        difficulty, variance = self._difficulty, self._variance
        if self._predictor is not None:
            is_new = self._seen == 0
            difficulty = np.where(is_new, self._predictor.predict(), difficulty)
            variance = np.where(is_new, self._predictor.variance(), variance)
        return difficulty, np.sqrt(1.0 + math.pi / 8.0 * variance)

    def _chance(self) -> NDArray[np.float64]:
        """Return the probability float64 [N] that chance decides an item."""
        return sigmoid(self._odds) if self.config.chance else np.zeros(self.items.count)

    def _worth_of_repeats(self) -> NDArray[np.float64]:
        """Return how much an item is worth, float64 [N] in (0, 1], beside one that is as hard and was never seen."""
        until = self.config.first_pass * (self.items.count - len(self.items.held_out))
        share = min(1.0, self.observations / until) if until > 0 else 1.0
        return np.where(self._seen > 0, share**REPEAT_POWER, 1.0)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state."""
        return {
            "difficulty": self._difficulty,
            "variance": self._variance,
            **self._evidence,
            "odds": self._odds,
            "successes": self._successes,
            "samples": self._samples,
            "seen": self._seen,
            "ability": self._ability,
            **self._predictor_arrays(),
        }

    def array_index(self, name: str) -> Literal["item", "skill"] | None:
        """Return what an array has an entry for."""
        if name == "ability":
            return "skill"
        return None if name in _PREDICTOR else "item"

    def _predictor_arrays(self) -> dict[str, NDArray[np.float64]]:
        one = self._predictor
        return {} if one is None else dict(zip(_PREDICTOR, (one.precision, one.pull, one.errors), strict=True))

    def completed(self, saved: Mapping[str, bytes]) -> dict[str, bytes]:
        """Predict from nothing if the tasks gave their difficulty when the state was saved."""
        nothing = {name: as_bytes(np.zeros(array.size), "float64") for name, array in self._predictor_arrays().items()}
        return nothing | dict(saved)

    def invalid_array(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        """Say so, too, of a variance that is not above 0, counts that cannot be and times below 0."""
        samples = arrays["samples"]
        is_possible: dict[str, Any] = {
            "variance": (arrays["variance"] > 0).all(),
            "samples": ((samples >= 0) & (samples <= _MAX_COUNT)).all(),
            "successes": ((arrays["successes"] >= 0) & (arrays["successes"] <= samples)).all(),
            "passes": (arrays["passes"] >= 0).all(),
            "failures": (arrays["failures"] >= 0).all(),
            "seen": (arrays["seen"] >= 0).all(),
        }
        if self._predictor is not None:
            is_possible["feature_errors"] = (arrays["feature_errors"] >= 0).all()
            is_possible["feature_precision"] = is_precision(arrays["feature_precision"])
        wrong = next((name for name, possible in is_possible.items() if not possible), None)
        return wrong or super().invalid_array(arrays)

    def figures(self) -> dict[str, float]:
        """Return the abilities, the means of a draw, and the share of items seen."""
        weights = self.weights()
        named = {f"ability/{name or 'all'}": float(a) for name, a in zip(self.items.skills, self._ability, strict=True)}
        return {
            **named,
            "drawn_difficulty": float((weights * self._expected()[0]).sum() / weights.sum()),
            "drawn_success": float((weights * self.success()).sum() / weights.sum()),
            "drawn_chance": float((weights * self._chance()).sum() / weights.sum()),
            "seen_share": float((self._seen > 0).mean()),
        }


def _prior(items: ItemPool, config: CurriculumConfig) -> tuple[NDArray[np.float64], float]:
    """Return what is believed of the difficulties before any result, float64 [N], and its standard error, in logits."""
    if items.difficulty is not None:
        difficulty = np.asarray(items.difficulty, np.float64)
        largest = np.abs(difficulty).max()
        if largest and not _SQUARABLE[0] < largest < _SQUARABLE[1]:
            difficulty = difficulty / largest  # the unit does not matter
        centred = difficulty - np.mean(difficulty)
        deviation = float(np.std(centred))
        if deviation > 0:
            return centred * (config.prior_spread / deviation), config.prior_deviation
    return np.zeros(items.count), config.deviation


def _log_constant(successes: float, samples: float) -> float:
    """Return the log likelihood of the results if success is one half or, as likely, any constant."""
    half = -samples * math.log(2.0)
    other = math.lgamma(1.0 + successes) + math.lgamma(1.0 + samples - successes) - math.lgamma(2.0 + samples)
    return max(half, other) + math.log1p(math.exp(-abs(half - other))) - math.log(2.0)
