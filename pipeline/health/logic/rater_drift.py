"""Checks for raters that change: they rate fixed samples otherwise than at first."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from lachesis.pipeline.health.logic.check import MAX_EXAMPLES, Check, CheckResult, HealthWindow, finite
from lachesis.pipeline.health.logic.trends import rank_correlation
from lachesis.schemas.annotations import FixedRating, GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["RaterDrift"]

_FIRST, _NEXT_FIRST = 4, 2
"""Ratings of a sample with which later ones are compared: those that it gets as it becomes a fixed one, or, of a rater
that was configured otherwise since then, the next ones."""
_RECENT = (12, 16, 24, 32, 48, 64, 96, 160)
"""Newest ratings that are compared with the first ones, in each of these numbers."""
_MAX_AGAIN = 6
"""Newest ratings of one sample among them that count."""
_MIN_SAMPLES = 10
_MAX_SAMPLES = 64
"""Samples of a rater that are remembered, the newest."""
_LIKELY_Z = 4.0
_SURE = 6.0
"""Minus the decimal logarithm of the chance."""
_MIN_SHIFT = 0.1
"""Least change of the mean, in standard deviations of the first ratings between samples."""
_MIN_FALL = 0.15
"""Least fall of the rank correlation."""
_FALL_Z = 3.0


class _Later(msgspec.Struct, array_like=True):
    """A rating of a sample that was rated before, beside a group of that policy step."""

    sample: str
    value: float
    step: int


class _Rater(msgspec.Struct):
    """Ratings by one rater, configured as `settings` says: the first of each sample, and the newest later ones.

    `first_step` is the last step of the first ones, `since` the one from which on it has been warned of.
    """

    settings: str
    first: dict[str, list[float]] = {}
    later: list[_Later] = []
    first_step: int = 0
    since: int | None = None

    def add(self, sample: str, value: float, step: int, most_first: int) -> None:
        first = self.first.setdefault(sample, [])
        if len(first) < most_first:
            first.append(value)
            self.first_step = max(self.first_step, step)
        else:
            self.later = [*self.later, _Later(sample, value, step)][-_RECENT[-1] :]
        if len(self.first) > _MAX_SAMPLES:
            del self.first[next(iter(self.first))]


Floats = NDArray[np.float64]
_Both = tuple[Sequence[float], Sequence[float]]
"""The first ratings of a sample and its newest ones."""


class _Change(NamedTuple):
    """How the newest `ratings` ratings of some samples differ from the first ones, `shift` on average, and since which
    step; `sure`: minus the decimal logarithm of the chance. `before` and `now` are rank correlations, None where the
    second is not lower. `lasts`: it is lower in the newest half of the ratings as well.
    """

    sure: float
    samples: list[str]
    shift: float
    since: int
    before: float | None = None
    now: float | None = None
    lasts: bool = False


class _Compared(NamedTuple):
    """Samples with their first ratings and their newest ones."""

    samples: list[str]
    both: list[_Both]

    def rank_correlations(self) -> tuple[float, float] | None:
        """Return that of the first ratings with each other, and that of the newest means with the first ones, if the
        second is lower by three standard errors (Fisher's)."""
        halves = [(fmean(first[::2]), fmean(first[1::2])) for first, _ in self.both]
        before = rank_correlation(*zip(*halves, strict=True))
        if before is None:
            return None
        after = rank_correlation(*zip(*((fmean(first), fmean(now)) for first, now in self.both), strict=True)) or 0.0
        was, now = (math.atanh(min(0.999, max(-0.999, r))) for r in (before, after))
        fell = before - after > _MIN_FALL and was - now > _FALL_Z * math.sqrt(2 / (len(self.both) - 3))
        return (before, after) if fell else None


class RaterDrift(Check):
    """A rater rates fixed samples otherwise than at first: it changed, whatever the policy does.

    Beside some groups (`scoring.fixed_samples`) the raters rate one of 32 answers of the first groups once more. The
    first four ratings of a sample are compared with the newest 12 to 160 ratings of all samples. If a rater did not
    change, the ratings of a sample could as well have come in any other order, however much the rater differs from
    itself. So the difference d of a sample's newest mean and its first one has a distribution over all orders, and
    Chernoff's bound says how likely a sum of d over the samples is that is as far from 0. A chance below 1e-6 and a
    mean of d beyond a tenth of the deviation between samples: the rater has become milder or stricter. That warns, and
    no more: within a group, all samples are still rated by one measure.

    The same of the sum of d^2 warns as well, if Spearman's correlation of the newest means with the first ones is lower
    by .15, and by three standard errors, than the one of the first ratings with each other. If that is so in the newest
    half of the ratings too, which leaves out those of before the change, the order of the samples is another one. Then
    advantages follow another measure than the run was begun with, and the warning becomes a quarantine. `lachesis
    resume` accepts the rater as it is now. A rater with other parameters, or another version, begins again, with two
    ratings a sample. The value is minus the decimal logarithm of the chance.
    """

    name = "rater_drift"

    def __init__(self) -> None:
        self._raters: dict[str, _Rater] = {}

    def evaluate(self, window: HealthWindow) -> CheckResult:
        for score in window.scores:
            if score.fixed is not None:
                self._record(score, score.fixed)
        compared = [rater for rater in self._raters.values() if len(rater.later) >= _RECENT[0]]
        if not compared:
            return CheckResult("idle", reason="too few ratings of fixed samples (`scoring.fixed_samples`)")
        changes: dict[str, _Change] = {}
        for name, rater in self._raters.items():
            change = _surest_change(rater)
            if change is None:
                rater.since = None
            else:
                rater.since = change.since if rater.since is None else rater.since
                changes[name] = change
        if not changes:
            return CheckResult("ok", 0.0, _SURE)
        worst = max(changes.values(), key=lambda change: (change.lasts, change.sure))
        reason = "; ".join(_describe(name, self._raters[name], change) for name, change in changes.items())
        examples = [sample.partition(" ")[0] for sample in worst.samples[:MAX_EXAMPLES]]
        return CheckResult("warn", worst.sure, _SURE, reason, examples, grows=worst.lasts)

    def _record(self, score: GroupScore, fixed: FixedRating) -> None:
        sample = f"{fixed.group} {fixed.sample}"
        for name, ratings in fixed.ratings.items():
            settings = fixed.raters.get(name, "")
            rater = self._raters.get(name)
            if rater is None or rater.settings != settings:
                rater = self._raters[name] = _Rater(settings)
            values: list[float | None] = [*ratings]
            most_first = _NEXT_FIRST
            if fixed.group == score.group:  # it has just become a fixed sample
                values, most_first = [*score.ratings.get(name, [])[fixed.sample : fixed.sample + 1], *ratings], _FIRST
            for value in finite(values):
                rater.add(sample, value, score.policy_step, most_first)

    def state_dict(self) -> dict[str, Any]:
        return {"raters": msgspec.to_builtins(self._raters)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._raters = convert_plain("health state", dict[str, _Rater], state["raters"])


def _describe(name: str, rater: _Rater, change: _Change) -> str:
    text = f"{name} rates the same {len(change.samples)} answers"
    if change.now is not None:
        how = "in another order" if change.lasts else "otherwise"
        text += f" {how} (rank correlation {change.now:.2f}, {change.before:.2f} at first), on average"
    direction = "higher" if change.shift > 0 else "lower"
    return (
        f"{text} {abs(change.shift):.2g} {direction} since about step {rater.since} than up to step {rater.first_step} "
        f"(chance below 1e-{math.floor(change.sure)}): the rater changed, not the policy"
    )


def _surest_change(rater: _Rater) -> _Change | None:
    """Return the change that is surest, over the numbers of newest ratings; None: the rater is as it was."""
    changes = (_change(rater, n) for n in _RECENT if n <= len(rater.later))
    return max((change for change in changes if change is not None), key=lambda change: change.sure, default=None)


def _compared(rater: _Rater, n: int) -> _Compared | None:
    """Return the samples of the newest `n` ratings, None if they are too few."""
    now: dict[str, list[float]] = {}
    for one in reversed(rater.later[-n:]):
        ratings = now.setdefault(one.sample, [])
        if len(ratings) < _MAX_AGAIN:
            ratings.append(one.value)
    samples = [sample for sample in now if len(rater.first.get(sample, ())) >= _NEXT_FIRST]
    if len(samples) < _MIN_SAMPLES:
        return None
    return _Compared(samples, [(rater.first[sample], now[sample]) for sample in samples])


def _change(rater: _Rater, n: int) -> _Change | None:
    """Return how the newest `n` ratings differ from the first ones; None: not beyond chance."""
    compared = _compared(rater, n)
    if compared is None:
        return None
    varied = [(first, now) for first, now in compared.both if len({*first, *now}) > 1]
    shift = math.fsum(_moved(*both) for both in varied) / len(compared.both)
    fell, sure = compared.rank_correlations(), 0.0
    if fell is not None:
        sure = _surprise(varied, np.square)
    if abs(shift) > _MIN_SHIFT * np.std([fmean(first) for first, _ in compared.both]):
        sign = math.copysign(1.0, shift)
        sure = max(sure, _surprise(varied, lambda moved: sign * moved) if _z_of_shift(varied) > _LIKELY_Z else 0.0)
    if sure <= _SURE:
        return None
    order = sorted(range(len(compared.both)), key=lambda i: -abs(_moved(*compared.both[i])))
    change = _Change(sure, [compared.samples[i] for i in order], shift, rater.later[-n].step)
    if fell is None:
        return change
    newer = _compared(rater, n // 2)
    return change._replace(
        before=fell[0], now=fell[1], lasts=newer is not None and newer.rank_correlations() is not None
    )


def _moved(before: Sequence[float], after: Sequence[float]) -> float:
    return fmean(after) - fmean(before)


def _z_of_shift(varied: Sequence[_Both]) -> float:
    """Return the absolute mean shift over all samples in its standard deviations over all orders of their ratings."""
    moved = spread = 0.0
    for before, after in varied:
        ratings = [*before, *after]
        centre, n = fmean(ratings), len(ratings)
        moved += _moved(before, after)
        squares = math.fsum((rating - centre) ** 2 for rating in ratings)
        spread += squares / (n - 1) * (1 / len(before) + 1 / len(after))
    return abs(moved) / math.sqrt(spread) if spread > 0 else 0.0


def _surprise(varied: Sequence[_Both], measure: Callable[[Floats], Floats]) -> float:
    """Return minus the decimal logarithm of the chance that, with the ratings of each sample in any order, the sum over
    samples of the measure of how far they moved is as large as it is.

    By Chernoff: for any t > 0, the chance is at most the product of the means of exp(t x), over exp(t times the sum).
    """
    of_orders = [measure(_moved_by_order(*both)) for both in varied]
    of_orders = [values - values.mean() for values in of_orders]
    total = math.fsum(values[0] for values in of_orders)
    spread = math.fsum(values.var() for values in of_orders)
    if total <= 0 or spread <= 0:
        return 0.0
    orders = np.array([len(values) for values in of_orders])
    starts = np.cumsum(orders) - orders
    highest = np.array([values.max() for values in of_orders])
    below = np.concatenate(of_orders) - np.repeat(highest, orders)

    def log_bound(t: float) -> float:
        means = np.add.reduceat(np.exp(t * below), starts) / orders
        return float((np.log(means) + t * highest).sum() - t * total)

    return max(0.0, -min(log_bound(total / spread * 2 ** (k / 2)) for k in range(-3, 11)) / math.log(10))


def _moved_by_order(before: Sequence[float], after: Sequence[float]) -> Floats:
    """Return how far a sample's mean moved, and how far it would have in each other order of its ratings."""
    ratings = np.array([*before, *after])
    firsts = ratings[_choices(len(ratings), len(before))].sum(axis=1)
    moved: Floats = (ratings.sum() - firsts) / len(after) - firsts / len(before)
    return moved


@lru_cache(maxsize=64)
def _choices(of: int, chosen: int) -> NDArray[np.intp]:
    """Return the ways to choose so many of the first numbers, the lowest ones first."""
    return np.array(list(combinations(range(of), chosen)), np.intp)
