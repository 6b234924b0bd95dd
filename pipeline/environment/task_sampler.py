"""Draws items with given weights: the curriculum's draw of a task, in the environment's process.

From the weights float32 [N] of a snapshot it draws items, with their probability. Building is O(N), once per snapshot;
a draw is a binary search, O(log N). Within one call no item comes twice, unless all items with a weight have come
already. The same weights and the same generator give the same items.
"""

import hashlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.schemas.errors import DataError

__all__ = ["DrawnItem", "ItemWeights", "TaskSampler"]


class DrawnItem(NamedTuple):
    """An item's index, and the probability with which the snapshot draws it first: weight / sum of weights."""

    item: int
    probability: float


class ItemWeights(NamedTuple):
    """Weights at one moment. `id` holds the number of observations and a hash of the weights."""

    id: str
    weights: NDArray[np.float32]

    @classmethod
    def of(cls, weights: NDArray[np.float32], observations: int) -> "ItemWeights":
        """Name the weights, which become read-only."""
        weights.setflags(write=False)
        digest = hashlib.blake2b(np.ascontiguousarray(weights, dtype="<f4").tobytes(), digest_size=8).hexdigest()
        return cls(f"{observations}-{digest}", weights)


class TaskSampler:
    """Draws items from one snapshot."""

    def __init__(self, weights: NDArray[np.float32], snapshot_id: str) -> None:
        self.snapshot_id = snapshot_id
        self._weights = weights
        self._cumulative = np.cumsum(weights, dtype=np.float64)
        self._total = float(self._cumulative[-1])
        self._positive = int(np.count_nonzero(weights))

    @classmethod
    def from_snapshot(cls, weights: NDArray[np.float32], snapshot_id: str = "") -> "TaskSampler":
        """Make a sampler. Raises DataError unless weights are [N], finite, >= 0, and one of them is above 0."""
        weights = np.asarray(weights, dtype=np.float32)
        if weights.ndim != 1 or not len(weights):
            raise DataError(f"curriculum weights have shape {weights.shape}; need one weight an item.")
        if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
            raise DataError("curriculum weights must be finite and at least 0, and one of them above 0.")
        return cls(weights, snapshot_id)

    def __len__(self) -> int:
        return len(self._weights)

    def probability(self, item: int) -> float:
        """Return the probability that `item` is drawn first."""
        return float(self._weights[item]) / self._total

    def sample(self, n: int, rng: np.random.Generator, *, recent: Sequence[int] = ()) -> list[DrawnItem]:
        """Draw n items, without replacement while there are items left that have a weight.

        `recent`: items drawn before, the oldest first. They come again only after all others, except the older ones
        where more than half of the items with a weight are recent.
        """
        newest = recent[max(0, len(recent) - self._positive // 2) :]
        avoided = {item for item in newest if self._weights[item] > 0}
        drawn: list[DrawnItem] = []
        while len(drawn) < n:
            drawn.extend(self._distinct(min(n - len(drawn), self._positive - len(avoided)), rng, avoided))
            avoided = set()
        return drawn

    def _distinct(self, n: int, rng: np.random.Generator, avoided: AbstractSet[int]) -> list[DrawnItem]:
        """Successive sampling: each next item by its weight among those left, by rejecting repeats."""
        found: dict[int, None] = {}
        for _ in range(4):
            if len(found) == n:
                break
            points = rng.random(2 * n + len(avoided)) * self._total
            items = np.searchsorted(self._cumulative, points, side="right")
            for item in items.tolist():
                # rounding may reach the end
                if item < len(self._weights) and self._weights[item] > 0 and item not in avoided:
                    found[item] = None
                if len(found) == n:
                    break
        if len(found) < n:  # a few items hold nearly all the weight: rank the others by exponential keys at once
            left = self._weights.astype(np.float64)
            left[[*found, *avoided]] = 0.0
            keys = np.full(len(left), np.inf)
            there = left > 0
            keys[there] = rng.exponential(size=int(there.sum())) / left[there]
            missing = n - len(found)
            nearest = np.argpartition(keys, missing - 1)[:missing]
            found.update(dict.fromkeys(nearest[np.argsort(keys[nearest], kind="stable")].tolist()))
        return [DrawnItem(item, self.probability(item)) for item in found]
