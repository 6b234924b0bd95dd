"""Computes exact first and second moments.

From finite floats it computes count, mean, population standard deviation, minimum and maximum. A value is held as the
integer round(x * 2^32) and all sums are Python integers, so adding is exact, commutative and associative: the result
does not depend, to the bit, on order, sharding or batching. The rounding of a value to 2^-32 is the only loss.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from lachesis.pipeline.common.number_arguments import listed
from lachesis.schemas.errors import DataError

__all__ = ["FRACTION_BITS", "MAX_ABS_VALUE", "MomentAccumulator", "Moments", "decay_weights", "fold", "quantize"]

FRACTION_BITS = 32
MAX_ABS_VALUE = 1e12
"""Largest magnitude that is accepted; beyond it a reward is a fault, and its square would drown all others."""


def quantize(value: float) -> int:
    """Return `value` as a fixed-point integer with 32 fraction bits, rounded half to even.

    Raises `DataError` on what is no number within +-1e298.
    """
    try:
        return round(value * 4294967296.0)  # scaling by a power of two is exact
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"value is {value!r:.80}; give a finite number, at most {MAX_ABS_VALUE:g} in magnitude."
        ) from error


@dataclass(slots=True)
class MomentAccumulator:
    """Sums over quantized values: `total` = sum q, `squares` = sum q^2. `low` and `high` are 0 while empty."""

    count: int = 0
    groups: int = 0
    total: int = 0
    squares: int = 0
    low: int = 0
    high: int = 0

    def add_group(self, column: Iterable[float | None]) -> None:
        """Add one group's finite values; None is skipped, and a column of None alone counts no group."""
        values = [quantize(value) for value in listed("value", column) if value is not None]
        if not values:
            return
        self.merge(MomentAccumulator(len(values), 1, sum(values), sum(q * q for q in values), min(values), max(values)))

    def merge(self, other: "MomentAccumulator") -> None:
        """Add what another accumulator holds."""
        if other.count == 0:
            return
        self.low = other.low if self.count == 0 else min(self.low, other.low)
        self.high = other.high if self.count == 0 else max(self.high, other.high)
        self.count += other.count
        self.groups += other.groups
        self.total += other.total
        self.squares += other.squares

    def to_list(self) -> list[str]:
        """Return the fields as decimal strings: sums of squares outgrow the integers of msgpack."""
        return [str(n) for n in (self.count, self.groups, self.total, self.squares, self.low, self.high)]

    @classmethod
    def from_list(cls, fields: Sequence[str]) -> Self:
        """Undo `to_list`."""
        return cls(*(int(field) for field in fields))


class Moments(msgspec.Struct, frozen=True):
    """Statistics of one key: `count` and `groups` are plain numbers, `mean` and `std` (population) weighted by decay.

    All but `count` and `groups` are in units of the raw reward.
    """

    count: int
    groups: int
    mean: float
    std: float
    low: float
    high: float


def decay_weights(decay: float, length: int) -> list[int]:
    """Return the weights decay^0 to decay^(length-1) in fixed point.

    They are computed by integer arithmetic alone, so they are equal on every machine.
    """
    step = quantize(decay)
    if not 0 <= step <= 1 << FRACTION_BITS:
        raise DataError(f"decay is {decay}; it must lie between 0 and 1.")
    weights = [1 << FRACTION_BITS]
    half = 1 << (FRACTION_BITS - 1)
    while len(weights) < length:
        weights.append((weights[-1] * step + half) >> FRACTION_BITS)
    return weights


def fold(parts: Iterable[tuple[int, MomentAccumulator]]) -> Moments | None:
    """Return the moments of accumulators with integer weights; None if there is nothing with a weight."""
    weight = total = squares = 0
    plain = MomentAccumulator()
    for factor, part in parts:
        weight += factor * part.count
        total += factor * part.total
        squares += factor * part.squares
        plain.merge(part)
    if weight == 0:
        return None
    # Division of integers is correctly rounded, and weight*squares >= total^2 holds exactly (Cauchy-Schwarz).
    mean = total / (weight << FRACTION_BITS)
    variance = (weight * squares - total * total) / (weight * weight << 2 * FRACTION_BITS)
    scale = float(1 << FRACTION_BITS)
    return Moments(plain.count, plain.groups, mean, math.sqrt(variance), plain.low / scale, plain.high / scale)
