"""The estimator interface: from the rewards of one complete group to one advantage a sample.

Pure float64.

A sample without a reward has None; it gets no advantage and enters no statistic. All sums are exactly rounded
(math.fsum), so the bits do not depend on the order of the samples. Inside a complete group every built-in estimator has
a bound, which is checked on every call: anything beyond it is a fault of the program.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import ClassVar, Literal

import msgspec

from lachesis.pipeline.common.number_arguments import listed, number_column, plain_numbers
from lachesis.schemas.errors import DataError

__all__ = ["Estimator", "GroupAdvantage", "RewardGroup", "Trainability"]

Trainability = Literal["trainable", "zero_variance", "unscorable"]
Column = Sequence[float | None]

NOISE = 1e-6
"""Rewards that differ by less than this, relative to the largest (or to 1), do not differ: dividing such a difference
by its own standard deviation would turn float noise into full-strength advantages."""
LIMIT = 1e100
"""Largest reward whose square is still a number."""


class GroupAdvantage(msgspec.Struct, frozen=True):
    """`advantages`: one a sample, None where its reward is missing, all 0 unless the verdict is trainable.

    `mean`, `std` (n-1 in the divisor; 0 for one sample), `range` are of the `n_valid` rewards, None without any.
    Verdict unscorable: fewer than two rewards, so nothing to compare. zero_variance: the rewards, or under pass@k the
    two best of them, do not differ.
    """

    advantages: tuple[float | None, ...]
    mean: float | None
    std: float | None
    range: float | None
    n_valid: int
    verdict: Trainability


def check_std_floor(std_floor: float) -> None:
    """Raise `DataError` unless the floor of a divisor is positive and finite."""
    if not (isinstance(std_floor, int | float) and 0 < std_floor < math.inf):
        raise DataError(f"std_floor is {std_floor!r:.80}; it must be positive and finite.")


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """Return token counts as a list. Raises `DataError` on an invalid count."""
    counts = listed("length", lengths)
    if {*map(type, counts)} == {int}:
        return counts
    for i, count in enumerate(counts):
        if not isinstance(count, Integral):
            raise DataError(f"length {i} is {count!r:.80}; give a whole number of tokens.")
    return [int(count) for count in counts]


def rating_columns(ratings: Mapping[str, Column] | None) -> dict[str, list[float | None]]:
    """Return ratings by rater as lists.

    Raises `DataError` unless they are columns of finite numbers.
    """
    if ratings is None:
        return {}
    if not isinstance(ratings, Mapping):
        raise DataError(f"ratings are {ratings!r:.80}; give a table of columns by rater.")
    return {name: number_column(f"rating of {name!s:.40}", column) for name, column in ratings.items()}


class RewardGroup:
    """The samples of one group that have a reward, in the group's order, and their statistics.

    `rewards`: normalized rewards, at least two that differ. `lengths`: generated tokens of each sample, None if they
    are unknown. `ratings`: by rater one rating a sample, None where it is missing. `mean` and
    `std` (n-1 in the divisor) are of the rewards, `centred` is rewards - mean, `range` the largest reward less the
    smallest. `divisor` is `std`, or `advantage.std_floor` where that is larger: divide by it, and rewards that hardly
    differ do not blow up.

    Raises `DataError` without rewards, on rewards that are no numbers within +-1e100, and on a floor that is not
    positive.
    """

    def __init__(
        self,
        rewards: list[float],
        std_floor: float,
        lengths: list[int] | None = None,
        ratings: Mapping[str, list[float | None]] | None = None,
    ) -> None:
        rewards = plain_numbers("reward", rewards, largest=LIMIT)
        if not rewards:
            raise DataError("a group of rewards is empty; give one reward for each sample that has one.")
        check_std_floor(std_floor)
        self.rewards = rewards
        self.lengths = lengths
        self.ratings = dict(ratings or {})
        self.n = len(rewards)
        self.range = max(rewards) - min(rewards)
        self.mean = math.fsum(rewards) / self.n
        self.centred = [x - self.mean for x in rewards]
        # A product is correctly rounded on every machine, a power is as good as its C library
        squares = math.fsum([c * c for c in self.centred])
        self.std = math.sqrt(squares / (self.n - 1)) if self.n > 1 else 0.0
        self.divisor = max(self.std, std_floor)


class Estimator(ABC):
    """One way from rewards to advantages. `name` is its name in events and snapshots."""

    name: str
    version: str | None = None
    """Of an estimator of one's own; None of a built-in one."""
    zero_mean: ClassVar[bool] = False
    """Whether the advantages of a group add up to 0, before they are whitened."""
    within_range: ClassVar[bool] = False
    """Whether no advantage is larger than the range of the rewards."""
    divides: ClassVar[bool] = False
    """Whether the advantages are centred rewards divided by their deviation."""
    whitens: bool = False
    """Whether the batcher whitens the advantages over its batch; see `batcher.whitening`."""

    def __init__(self, std_floor: float = 1e-3) -> None:
        """Raises `DataError` unless `std_floor` is positive and finite."""
        check_std_floor(std_floor)
        self.std_floor = std_floor

    @abstractmethod
    def estimate(self, group: RewardGroup) -> list[float]:
        """Return one advantage for each of the group's rewards. Raises `DataError` where it cannot."""

    @abstractmethod
    def bound(self, group: RewardGroup) -> float:
        """Return the largest magnitude that `estimate` may return for the group."""

    def spread(self, group: RewardGroup) -> float:
        """Return the difference that there must be for something to be learned."""
        return group.range

    def check(self, group: RewardGroup) -> None:  # noqa: B027 - most need nothing
        """Raise `DataError` where the estimator lacks something that it needs of the group."""

    def advantages(
        self, rewards: Column, lengths: Sequence[int] | None = None, ratings: Mapping[str, Column] | None = None
    ) -> GroupAdvantage:
        """Return the advantages of one group.

        `lengths` are generated tokens a sample, `ratings` by rater one a sample.

        Raises `DataError` on a value that is no number within +-1e100, or if data that the estimator needs is missing.
        """
        rewards = number_column("reward", rewards, largest=LIMIT)
        lengths = None if lengths is None else checked_lengths(lengths)
        columns = rating_columns(ratings)
        valid = [i for i, reward in enumerate(rewards) if reward is not None]
        r = [reward for reward in rewards if reward is not None]
        if not r:
            return GroupAdvantage((None,) * len(rewards), None, None, None, 0, "unscorable")
        if lengths is not None and len(lengths) != len(rewards):
            lengths = None
        columns = {name: column for name, column in columns.items() if len(column) == len(rewards)}
        if len(valid) < len(rewards):
            lengths = None if lengths is None else [lengths[i] for i in valid]
            columns = {name: [column[i] for i in valid] for name, column in columns.items()}
        group = RewardGroup(r, self.std_floor, lengths, columns)
        self.check(group)
        verdict: Trainability = "trainable"
        if group.n < 2:
            verdict = "unscorable"
        elif self.spread(group) <= NOISE * max(1.0, *map(abs, r)):
            verdict = "zero_variance"
        values = [0.0] * group.n
        if verdict == "trainable":
            values = self.estimate(group)
            limit = self.bound(group)
            if not max(map(abs, values)) <= limit * (1 + 1e-9):
                raise AssertionError(f"{self.name} advantages {values} of rewards {r} exceed their bound {limit}")
        if len(valid) == len(rewards):
            return GroupAdvantage(tuple(values), group.mean, group.std, group.range, group.n, verdict)
        found: list[float | None] = [None] * len(rewards)
        for i, value in zip(valid, values, strict=True):
            found[i] = value
        return GroupAdvantage(tuple(found), group.mean, group.std, group.range, group.n, verdict)
