"""How sure an alpha is: confidence intervals for Krippendorff's alpha, interval metric.

In: units as for `IntervalAlpha`. Out: an interval, or None where alpha is undefined. Below about fifty units the
delete-one jackknife (Hughes 2022, arXiv:2210.13265); above, the bootstrap over units, percentile method. `StreamingCI`
is that bootstrap without the units: each unit enters replicate b with a Poisson(1) weight drawn from a hash of its name
and b, so units may come in any order, over any number of processes, and give the same bits.
"""

import hashlib
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.scoring.logic.krippendorff import IntervalAlpha

__all__ = ["Interval", "StreamingCI", "alpha_interval"]

_MIN_GROUPS = 50
_SCALE = 1 << 16
"""Ratings are rounded to 2^-16 here, so that sums over 10^8 units of ratings up to 1 fit in 64 bits."""
_POISSON_TAIL = np.cumsum([np.exp(-1.0) / float(np.prod(range(1, k + 1), dtype=float)) for k in range(12)])


class Interval(NamedTuple):
    """`low` and `high` hold alpha with probability `level`; `method` says how they were found."""

    low: float
    high: float
    level: float
    method: str


def alpha_interval(
    units: Sequence[Sequence[float | None]], *, level: float = 0.95, replicates: int = 1000, seed: int = 0
) -> Interval | None:
    """Return the interval over recorded units; None where alpha, or every replicate of it, is undefined."""
    whole = IntervalAlpha()
    for unit in units:
        whole.add_unit(unit)
    kept = [unit for unit in units if sum(x is not None for x in unit) > 1]
    if whole.alpha().value is None:
        return None
    if len(kept) < _MIN_GROUPS:
        return _jackknife(whole, kept, level)
    sums = np.array([_sums(unit) for unit in kept])
    weights = np.random.default_rng(seed).multinomial(len(kept), np.full(len(kept), 1 / len(kept)), replicates)
    sizes = {m: weights[:, sums[:, 0] == m] @ sums[sums[:, 0] == m] for m in sorted(set(sums[:, 0].tolist()))}
    return _percentile(_alphas(sizes), level, "bootstrap")


def _jackknife(whole: IntervalAlpha, units: Sequence[Sequence[float | None]], level: float) -> Interval | None:
    value = whole.alpha().value
    without = []
    for unit in units:
        whole.remove(unit)
        one = whole.alpha().value
        whole.add_unit(unit)
        if one is None:
            return None
        without.append(one)
    n = len(without)
    if value is None or n < 2:
        return None
    error = float(np.sqrt((n - 1) / n * np.sum((np.array(without) - np.mean(without)) ** 2)))
    reach = NormalDist().inv_cdf(0.5 + level / 2) * error
    return Interval(value - reach, min(1.0, value + reach), level, "jackknife")


class StreamingCI:
    """Bootstrap replicates of alpha, fed one unit at a time. Memory: four numbers a replicate and number of raters."""

    def __init__(self, replicates: int = 200) -> None:
        self.replicates = replicates
        self.sums: dict[int, NDArray[np.int64]] = {}  # m -> [replicates, (units, S1, S2, S1^2)]

    def add_unit(self, name: str, unit: Sequence[float | None], times: int = 1) -> None:
        """Add the unit called `name`, unique among all units; `times` of -1 takes it back."""
        values = [round(x * _SCALE) for x in unit if x is not None]
        m = len(values)
        if m < 2:
            return
        s1, s2 = sum(values), sum(q * q for q in values)
        row = np.array([1, s1, s2, s1 * s1], np.int64)
        table = self.sums.setdefault(m, np.zeros((self.replicates, 4), np.int64))
        table += times * _weights(name, self.replicates)[:, None] * row

    def merge(self, other: "StreamingCI") -> None:
        """Add all units of another with as many replicates."""
        if other.replicates != self.replicates:
            raise ValueError(f"cannot merge {other.replicates} replicates into {self.replicates}.")
        for m, table in other.sums.items():
            self.sums[m] = self.sums.get(m, np.zeros_like(table)) + table

    def interval(self, level: float = 0.95) -> Interval | None:
        """Return the interval over the units held; None where no replicate has an alpha."""
        sizes = {
            m: np.stack([table[:, 0] * m, table[:, 1], table[:, 2], table[:, 3]], axis=1).astype(float)
            / np.array([1.0, _SCALE, _SCALE**2, _SCALE**2])
            for m, table in self.sums.items()
        }
        return _percentile(_alphas(sizes), level, "streaming bootstrap") if sizes else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sums as lists of integers (msgpack-able)."""
        return {"replicates": self.replicates, "sums": {str(m): table.tolist() for m, table in self.sums.items()}}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "StreamingCI":
        """Undo `state_dict`."""
        made = cls(int(state["replicates"]))
        made.sums = {int(m): np.array(table, np.int64) for m, table in state["sums"].items()}
        return made


def _sums(unit: Sequence[float | None]) -> list[float]:
    values = [x for x in unit if x is not None]
    s1 = sum(values)
    return [float(len(values)), s1, sum(x * x for x in values), s1 * s1]


def _alphas(sizes: dict[int, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return alpha of each replicate [B], NaN where undefined; tables hold (ratings, S1, S2, S1^2) sums [B, 4] by m."""
    tables = list(sizes.values())
    n, t1, t2, _ = sum(tables[1:], start=tables[0].copy()).T
    within = sum((m * table[:, 2] - table[:, 3]) / (m - 1) for m, table in sizes.items())
    expected = n * t2 - t1 * t1
    floor = 1e-12 * np.maximum(n * t2, 1e-300)  # rounding is all that is left of no variation
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(expected > floor, 1 - (n - 1) * within / expected, np.nan)


def _percentile(alphas: NDArray[np.float64], level: float, method: str) -> Interval | None:
    defined = alphas[np.isfinite(alphas)]
    if not defined.size:
        return None
    low, high = np.quantile(defined, [0.5 - level / 2, 0.5 + level / 2]).tolist()
    return Interval(low, high, level, method)


def _weights(name: str, replicates: int) -> NDArray[np.int64]:
    """Return the Poisson(1) weights of a unit, the same wherever they are computed."""
    stream = hashlib.shake_128(name.encode()).digest(4 * replicates)
    uniform = np.frombuffer(stream, "<u4") / 2**32
    return np.searchsorted(_POISSON_TAIL, uniform, side="right").astype(np.int64)
