"""Draws the items whose next group is expected to teach most for the tokens that it costs.

An item is worth g r^m / c. g = q(1-q) / s is the success variance that `irt` expects of it (see there): a group moves
a policy by about that much, and one in which all answers fare alike by nothing, so what is drawn again for want of
variance is in the price. m counts the groups of the item so far, and r, `repeat_worth`, is what each teaches as a
share of the one before. c is what an answer costs. The weight is the worth to the power `SHARPNESS`, times the
probability that the item is sound.

An item that was not met yet is worth what such items gave lately: g is multiplied by the success variance of first
meetings over what was expected of them, and c is predicted from the difficulty that was expected before, by a linear
regression of the first prices, in logarithms. So without repeats that pay this is a pass over all items: those not met
have equal worth, and more than those that were met. Repeats come in where they are cheap or half solved, and what is
hopeless or solved comes back when the ability moved far enough.

Items with the same prompt and the same data for raters are one: one of them is drawn, and has the results of all.

Answers grow and shrink while a policy learns, so prices are relative to a level that follows all results: a task is not
cheap because it was met early.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.irt import OnlineIRT
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool, finite_sigmoid, sigmoid

__all__ = ["GainPerToken"]

SHARPNESS = 8.0
"""Exponent of an item's worth in its weight."""
_KEPT = 1.0 - 1.0 / 200.0
"""What a first meeting counts for after the next one."""
_GAIN_PRIOR = 1.0
"""Success variance, summed over first meetings, for which the belief counts that they give what was expected."""
_LEVEL_RATE = 0.02
"""Step of the level of prices, after the first results."""
_PRICE_RATE = 0.5
"""Step of the price of an item that was met before."""
_FIT_RIDGE = 10.0
"""Logits squared by which the slope of prices over difficulties is held back."""


class GainPerToken(OnlineIRT):
    """State: that of `OnlineIRT`; per item how many groups it had int64 [N], and the logarithm of what an
    answer costs over the level float64 [N]; the level and how many results it rests on float64 [2]; of first meetings
    the success variance that was expected and that was found float64 [2], and the sums 1, x, y, x x, x y, y y float64
    [6] of expected difficulties x and prices y. 96 bytes an item.
    """

    def __init__(self, items: ItemPool, config: CurriculumConfig) -> None:
        super().__init__(items, config)
        self._stands = _representatives(items)
        self._copies = np.flatnonzero(self._stands != np.arange(items.count))
        self._met = np.zeros(items.count, np.int64)
        self._price = np.zeros(items.count)
        self._level = np.zeros(2)
        self._first_gains = np.zeros(2)
        self._first_prices = np.zeros(6)

    def left_out(self) -> NDArray[np.int64]:
        """Return the held-out items, and those that another one of the same content stands for."""
        return np.concatenate([self.items.held_out, self._copies])

    def worth(self) -> NDArray[np.float64]:
        """Return the expected gain a token to the power `SHARPNESS`, 1 for the best item."""
        difficulty, stretch = self._expected()
        q = sigmoid((self._ability[self._skill] - difficulty) / stretch)
        is_new = self._seen == 0
        log = np.log(np.maximum(q * (1.0 - q), np.finfo(np.float64).tiny)) - np.log(stretch)
        log += self._met * math.log(self.config.repeat_worth)
        log[is_new] += math.log(self._first_gain())
        mean, slope, spare = self._price_of_new()
        log -= np.where(is_new, mean + slope * difficulty + spare, self._price)
        log[self.left_out()] = -np.inf
        weight: NDArray[np.float64] = np.exp(SHARPNESS * (log - log.max())) * (1.0 - self._chance())
        return weight

    def learn(self, feedback: ItemFeedback, success: float, discount: float) -> None:
        """Learn what `irt` learns; count the meeting, and its price."""
        i = int(self._stands[feedback.item])
        is_first = self._seen[i] == 0
        before, gain = self._expected_of(i)
        super().learn(replace(feedback, item=i), success, discount)
        if is_first and feedback.n > 1:
            found = success * (1.0 - success) * feedback.n / (feedback.n - 1)
            self._first_gains[:] = _KEPT * self._first_gains + (gain, found)
        self._met[i] += 1
        if is_first:
            mean, slope, _ = self._price_of_new()
            self._price[i] = mean + slope * before
        if feedback.tokens is not None:
            self._learn_price(i, math.log(max(feedback.tokens, 1.0)), 1.0 if is_first else _PRICE_RATE)
        if is_first:
            y = float(self._price[i])
            self._first_prices[:] = _KEPT * self._first_prices + (1.0, before, y, before * before, before * y, y * y)

    def _learn_price(self, i: int, tokens: float, rate: float) -> None:
        level, results = self._level.tolist()
        if results == 0:
            level = tokens - float(self._price[i])
        surprise = tokens - level - float(self._price[i])
        self._price[i] += rate * surprise
        self._level[:] = level + max(_LEVEL_RATE, 1.0 / (1.0 + results)) * surprise, results + 1.0

    def _first_gain(self) -> float:
        """Return the success variance of first meetings, over what was expected of them."""
        expected, found = self._first_gains.tolist()
        return float((_GAIN_PRIOR + found) / (_GAIN_PRIOR + expected))

    def _price_of_new(self) -> tuple[float, float, float]:
        """Return the intercept and slope of the logarithm of the price of an item that was not met over its difficulty,
        and by how much the logarithm of the mean price is higher, as of a normal density.

        It is 0 at the mean difficulty: what first meetings cost on average is in the level.
        """
        n, x, y, xx, xy, yy = self._first_prices.tolist()
        if n == 0:
            return 0.0, 0.0, 0.0
        sxx, sxy, syy = xx - x * x / n, xy - x * y / n, yy - y * y / n
        slope = sxy / (_FIT_RIDGE + max(sxx, 0.0))
        return -slope * x / n, slope, max(syy - slope * sxy, 0.0) / (2.0 * n)

    def _expected_of(self, i: int) -> tuple[float, float]:
        """Return the expected difficulty and success variance of one item."""
        difficulty, variance = float(self._difficulty[i]), float(self._variance[i])
        if self._predictor is not None and self._seen[i] == 0:
            difficulty, variance = self._predictor.predict_one(i), self._predictor.variance()
        stretch = math.sqrt(1.0 + math.pi / 8.0 * variance)
        q = finite_sigmoid((float(self._ability[self._skill[i]]) - difficulty) / stretch)
        return difficulty, q * (1.0 - q) / stretch

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the whole state."""
        return {
            **super().arrays(),
            "met": self._met,
            "price": self._price,
            "level": self._level,
            "first_gains": self._first_gains,
            "first_prices": self._first_prices,
        }

    def array_index(self, name: str) -> Literal["item", "skill"] | None:
        """Return what an array has an entry for."""
        if name in ("level", "first_gains", "first_prices"):
            return None
        return super().array_index(name)

    def invalid_array(self, arrays: Mapping[str, NDArray[Any]]) -> str | None:
        """Say so, too, of counts and sums of squares below 0."""
        names = ("met", "first_gains")
        return next((name for name in names if not (arrays[name] >= 0).all()), None) or super().invalid_array(arrays)

    def figures(self) -> dict[str, float]:
        """Return those of `irt`, and the share of the items that another one of the same content stands for."""
        return {**super().figures(), "copies_share": len(self._copies) / self.items.count}


def _representatives(items: ItemPool) -> NDArray[np.int64]:
    """Return for each item that one of the same content which is drawn for all, int64 [N].

    It is the drawable one with the lowest key, whatever their order in the pool.
    """
    places = np.arange(items.count)
    if items.contents is None:
        return places
    is_held_out = np.zeros(items.count, np.bool_)
    is_held_out[items.held_out] = True
    order = np.lexsort((places if items.keys is None else items.keys, is_held_out))
    _, first, which = np.unique(items.contents[order], return_index=True, return_inverse=True)
    stands = np.empty(items.count, np.int64)
    stands[order] = order[first][which]
    return stands
