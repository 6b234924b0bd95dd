"""Statistics of two columns of scores: distributions, rank correlation, correlation with length. Pure.

Missing values are left out, in both columns where they are paired; what is undefined is None, never 0 or 1.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.health.logic.trends import correlation

__all__ = ["Distribution", "distribution", "histograms", "rank_correlation", "within_groups"]

Column = Sequence[float | None]
_ROUNDING = 1e-12
"""Differences of a smaller share of the largest magnitude come from rounding."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of `n` values, with `missing` beside them; `std` is the population's."""

    n: int
    missing: int
    mean: float
    std: float
    low: float
    q25: float
    median: float
    q75: float
    high: float


def distribution(values: Column) -> Distribution | None:
    """Return how `values` are distributed, None without any."""
    present = np.array([value for value in values if value is not None], np.float64)
    if not present.size:
        return None
    low, q25, median, q75, high = np.quantile(present, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return Distribution(
        n=int(present.size),
        missing=len(values) - int(present.size),
        mean=float(present.mean()),
        std=float(present.std()),
        low=low,
        q25=q25,
        median=median,
        q75=q75,
        high=high,
    )


def histograms(a: Column, b: Column, bins: int = 24) -> tuple[list[float], list[int], list[int]]:
    """Return edges [bins + 1] common to both columns, and how many values of each lie between.

    Empty without values.
    """
    columns = [np.array([value for value in column if value is not None], np.float64) for column in (a, b)]
    together = np.concatenate(columns)
    if not together.size:
        return [], [], []
    edges = np.histogram_bin_edges(together, bins)
    counts = [np.histogram(column, edges)[0].tolist() for column in columns]
    return edges.tolist(), counts[0], counts[1]


def rank_correlation(a: Column, b: Column) -> float | None:
    """Return Spearman's rho of paired columns, ties at their mean rank.

    None below two pairs or without variation.
    """
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    if len(pairs) < 2:
        return None
    x, y = (_ranks(np.array(column, np.float64)) for column in zip(*pairs, strict=True))
    x, y = x - x.mean(), y - y.mean()
    return correlation(float(x @ y), float(x @ x), float(y @ y))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: NDArray[np.float64] = (last - (counts - 1) / 2)[place]
    return mean


def within_groups(groups: Iterable[tuple[Column, Sequence[float]]]) -> float | None:
    """Return Pearson's r of two columns, each centred within its group, pooled over the groups."""
    columns: list[NDArray[np.float64]] = []
    for first, second in groups:
        pairs = np.array([(x, y) for x, y in zip(first, second, strict=True) if x is not None], np.float64)
        if len(pairs) > 1:
            centred = pairs - pairs.mean(axis=0)
            columns.append(np.where(np.ptp(pairs, axis=0) > _ROUNDING * np.abs(pairs).max(axis=0), centred, 0.0))
    if not columns:
        return None
    together = np.concatenate(columns)
    largest = np.abs(together).max(axis=0)
    x, y = (together / np.where(largest > 0, largest, 1.0)).T
    return correlation(float(x @ y), float(x @ x), float(y @ y))
