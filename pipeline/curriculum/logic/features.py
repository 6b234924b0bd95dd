"""Predicts the difficulty of untried items from cheap features of their prompts. Pure.

Features are logarithms of counts. The prediction is a Bayesian linear regression of the difficulties found so far, in
logits, without an intercept, since the skill's ability takes its place: each weight is N(0, 1) before the first result.
Its state has the same size whatever the number of items, and a result costs the same. Only sums in a fixed order are
taken, so equal results in equal order give equal predictions.
"""

import math
import re

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEATURES", "DifficultyPredictor", "is_precision", "prompt_features"]

FEATURES = ("characters", "words", "distinct words", "numbers", "digits", "signs")
_NUMBER = re.compile(r"[0-9]+")
_SIGN = re.compile(r"[^\w\s]")
_NOISE_VARIANCE = 9.0
"""Of difficulties about their predictions, in logits squared: what one counts for falls with this and its own error."""
_PRIOR_ERRORS = 20.0
"""Results that the variance of an item without a difficulty counts for, beside the errors of predictions."""


def prompt_features(text: str) -> tuple[float, ...]:
    """Return log(1 + count) of each of `FEATURES` in a prompt."""
    words, numbers = text.split(), _NUMBER.findall(text)
    counts = (
        len(text),
        len(words),
        len(set(words)),
        len(numbers),
        sum(map(len, numbers)),
        len(_SIGN.findall(text)),
    )
    return tuple(math.log1p(count) for count in counts)


class DifficultyPredictor:
    """State: what all results add to the precision of the weights float64 [F, F] and to its product with their mean
    float64 [F]; how many predictions were tested, and the sum of their squared errors float64 [2].
    """

    def __init__(self, features: NDArray[np.float32], variance: float) -> None:
        """`features` float32 [N, F]; `variance` of a difficulty before any result, which no prediction exceeds."""
        centred = features - features.mean(axis=0, dtype=np.float64).astype(np.float32)
        scale = np.asarray(centred.std(axis=0, dtype=np.float64), np.float32)
        self._features: NDArray[np.float32] = centred / np.where(scale > 0, scale, np.float32(1.0))
        self._most = variance
        count = features.shape[1]
        self.precision = np.zeros((count, count))
        self.pull = np.zeros(count)
        self.errors = np.zeros(2)

    def weights(self) -> NDArray[np.float64]:
        """Return the mean of the posterior of the weights float64 [F]."""
        return np.asarray(np.linalg.solve(np.eye(len(self.pull)) + self.precision, self.pull), np.float64)

    def predict(self) -> NDArray[np.float64]:
        """Return the expected difficulty of every item float64 [N]."""
        total = np.zeros(len(self._features))
        for column, weight in zip(self._features.T, self.weights().tolist(), strict=True):
            total += np.multiply(column, weight, dtype=np.float64)
        return total

    def predict_one(self, item: int) -> float:
        """Return the expected difficulty of one item, that of `predict`."""
        pairs = zip(self.weights().tolist(), self._features[item].tolist(), strict=True)
        return float(sum(weight * value for weight, value in pairs))

    def variance(self) -> float:
        """Return the mean squared error of predictions, at most that of an item of which nothing is known."""
        tested, squares = self.errors.tolist()
        return min(self._most, (_PRIOR_ERRORS * self._most + squares) / (_PRIOR_ERRORS + tested))

    def learn(self, item: int, difficulty: float, variance: float) -> None:
        """Take in what the first result of an item says of its difficulty."""
        x = self._features[item].astype(np.float64)
        self.errors += (1.0, (difficulty - self.predict_one(item)) ** 2)
        weight = 1.0 / (variance + _NOISE_VARIANCE)
        self.precision += weight * np.outer(x, x)
        self.pull += weight * difficulty * x


def is_precision(flat: NDArray[np.float64]) -> bool:
    """Say whether float64 [F * F] can be a precision that results added: finite, not clearly negative."""
    side = math.isqrt(len(flat))
    matrix = flat.reshape(side, side)
    return bool(np.isfinite(matrix).all() and np.linalg.eigvalsh(matrix).min() >= -1e-6 * np.abs(matrix).max())
