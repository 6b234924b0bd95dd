"""Statistics of two columns of scores: distributions, rank correlation, correlation with length. Pure.

Missing values are left out, in both columns where they are paired; what is undefined is None, never 0 or 1. Values lie
within +-1e150, so that sums of their squares are numbers. `DataError` is raised on others, and on what is no column.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.common.number_arguments import listed, number_column
from lachesis.pipeline.health.logic.trends import correlation
from lachesis.schemas.errors import DataError

__all__ = ["Distribution", "distribution", "histograms", "rank_correlation", "within_groups"]

Column = Sequence[float | None]
_ROUNDING = 1e-12
"""Differences of a smaller share of the largest magnitude come from rounding."""


_MAX_ABS_VALUE = 1e150


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
    values = _column(values)
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
    columns = [np.array([value for value in _column(column) if value is not None], np.float64) for column in (a, b)]
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
    pairs = [(x, y) for x, y in _paired(a, b) if x is not None and y is not None]
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
    for group in listed("group", groups):
        if not isinstance(group, Sequence) or len(group) != 2:
            raise DataError(f"a group is {group!r:.80}; give a pair of columns.")
        pairs = np.array([(x, y) for x, y in _paired(*group) if x is not None and y is not None], np.float64)
        if len(pairs) > 1:
            centred = pairs - pairs.mean(axis=0)
            columns.append(np.where(np.ptp(pairs, axis=0) > _ROUNDING * np.abs(pairs).max(axis=0), centred, 0.0))
    if not columns:
        return None
    together = np.concatenate(columns)
    largest = np.abs(together).max(axis=0)
    x, y = (together / np.where(largest > 0, largest, 1.0)).T
    return correlation(float(x @ y), float(x @ x), float(y @ y))


def _column(values: Column) -> list[float | None]:
    return number_column("value", values, largest=_MAX_ABS_VALUE)


def _paired(a: Column, b: Column) -> list[tuple[float | None, float | None]]:
    first, second = _column(a), _column(b)
    if len(first) != len(second):
        raise DataError(f"columns have lengths {len(first)} and {len(second)}; give two of one length.")
    return list(zip(first, second, strict=True))
