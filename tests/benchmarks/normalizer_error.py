"""Error of the variance at a large offset: the normalizer's sums against the forms that are in use elsewhere.

Draws x = offset + N(0, 1) and prints, for each way to its variance, the relative error against the exact variance of
the very numbers drawn (int64 arithmetic on x - offset, which is exact), and microseconds a sample.

    .venv/bin/python tests/benchmarks/normalizer_error.py --samples 1e8
"""

import argparse
import math
import time
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.normalizer.logic.accumulator import MomentAccumulator, fold

BATCH = 1_000_000
GROUP = 8
SCALAR = 10_000_000
"""Samples that the scalar float form is given at most: a loop in Python."""


def batches(samples: int, offset: float) -> Iterator[NDArray[np.float64]]:
    rng = np.random.default_rng(0)
    for start in range(0, samples, BATCH):
        yield offset + rng.standard_normal(min(BATCH, samples - start))


class Exact:
    """Variance of x as a fraction. x - offset is a multiple of 2^-`bits`, split so that its squares fit in int64."""

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self.bits = 52 - math.frexp(offset)[1]
        self.n = self.total = self.squares = 0

    def add(self, x: NDArray[np.float64]) -> None:
        units = np.ldexp(x - self.offset, self.bits + 1)
        whole = units.astype(np.int64)
        assert (whole == units).all(), "x - offset is not exact"
        high, low = whole >> 12, whole & 4095
        self.n += len(x)
        self.total += int(whole.sum())
        self.squares += (int(high @ high) << 24) + (int(high @ low) << 13) + int(low @ low)

    def variance(self) -> Fraction:
        return Fraction(self.n * self.squares - self.total**2, self.n**2 << 2 * (self.bits + 1))


class Chan:
    """Float moments, merged batch by batch."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0

    def add(self, x: NDArray[np.float64]) -> None:
        mean = float(x.mean())
        d, n = mean - self.mean, self.n + len(x)
        self.m2 += float(((x - mean) ** 2).sum()) + d * d * self.n * len(x) / n
        self.mean += d * len(x) / n
        self.n = n

    def variance(self) -> float:
        return self.m2 / self.n


class Welford:
    """Float moments, one sample at a time."""

    def __init__(self) -> None:
        self.n, self.mean, self.m2 = 0, 0.0, 0.0

    def add(self, x: NDArray[np.float64]) -> None:
        n, mean, m2 = self.n, self.mean, self.m2
        for value in x.tolist():
            n += 1
            d = value - mean
            mean += d / n
            m2 += d * (value - mean)
        self.n, self.mean, self.m2 = n, mean, m2

    def variance(self) -> float:
        return self.m2 / self.n


class Naive:
    """Mean of squares minus square of the mean, in float64."""

    def __init__(self) -> None:
        self.n, self.total, self.squares = 0, 0.0, 0.0

    def add(self, x: NDArray[np.float64]) -> None:
        self.n, self.total = self.n + len(x), self.total + float(x.sum())
        self.squares += float((x * x).sum())

    def variance(self) -> float:
        return self.squares / self.n - (self.total / self.n) ** 2


class Ours:
    """The normalizer's accumulator, one window a batch, folded at the end."""

    def __init__(self) -> None:
        self.windows: list[MomentAccumulator] = []

    def add(self, x: NDArray[np.float64]) -> None:
        self.windows.append(MomentAccumulator())
        values = x.tolist()
        for start in range(0, len(values), GROUP):
            self.windows[-1].add_group(values[start : start + GROUP])

    def variance(self) -> float:
        moments = fold((1 << 32, window) for window in self.windows)
        assert moments is not None
        return moments.std**2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=float, default=1e6)
    parser.add_argument("--offset", type=float, default=1e9)
    options = parser.parse_args()
    samples = int(options.samples)
    print(f"{samples} samples of {options.offset:g} + N(0, 1)")
    for name, form, most in (
        ("lachesis", Ours, samples),
        ("Chan, batches of 1e6", Chan, samples),
        ("Welford, scalar", Welford, SCALAR),
        ("E[x^2] - E[x]^2", Naive, samples),
    ):
        exact, made = Exact(options.offset), form()
        spent = 0.0
        for x in batches(min(samples, most), options.offset):
            exact.add(x)
            start = time.process_time()
            made.add(x)
            spent += time.process_time() - start
        truth = exact.variance()
        error = float((Fraction(made.variance()) - truth) / truth)
        print(f"{name:22} n {exact.n:9}: variance {made.variance():.12g}, relative error {error:+.1e}, "
              f"{1e6 * spent / exact.n:.3f} us a sample")  # fmt: skip


if __name__ == "__main__":
    main()
