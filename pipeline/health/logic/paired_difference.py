"""The mean of differences within groups: between samples that have something and the others."""

from __future__ import annotations

import math

import msgspec

__all__ = ["PairedDifference"]


class PairedDifference(msgspec.Struct, array_like=True):
    """Differences of two means within a group, of so many groups: their sum and the sum of their squares."""

    groups: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        """Take in the difference of one group."""
        self.groups, self.total, self.squares = self.groups + 1, self.total + value, self.squares + value * value

    def __add__(self, other: PairedDifference) -> PairedDifference:
        return PairedDifference(self.groups + other.groups, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.groups)

    @property
    def z(self) -> float:
        """The mean over its standard error; 0 with fewer than eight groups."""
        if self.groups < 8:
            return 0.0
        spread = max(0.0, self.squares / self.groups - self.mean**2) / (self.groups - 1)
        return self.mean / max(math.sqrt(spread), 1e-9)
