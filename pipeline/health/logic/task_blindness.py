"""Checks for raters that come to pay answers whatever the task is, by ratings for another task."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from lachesis.pipeline.health.logic.check import Check, CheckResult, HealthWindow, finite, is_number, mean
from lachesis.pipeline.health.logic.trends import student_z
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.values import convert_plain

__all__ = ["TaskBlindness"]

_LEVEL_GROUPS = 64
"""First groups, whose ratings say what a high one is."""
_FIRST_CONTROLS, _FIRST_HIGH = 24, 40
"""Groups with controls, and samples of them that are rated high, with which later ones are compared."""
_RECENT = (6, 12, 24, 48)
"""Newest groups with controls that are compared with the first, in each of these numbers."""
_MIN_HIGH, _MIN_GROUPS = 12, 5
_MAX_FIRST_SHARE = 0.4
"""A rater of which more is paid for any task from the start looks at something else than the task."""
_MIN_RISE, _WARN_Z = 0.08, 3.5


class _Counted(msgspec.Struct, array_like=True):
    """Samples of a group that a rater rates high, and those of them that it also rates high for another task."""

    high: int
    both: int
    score: float
    gap: float | None
    """Mean of its ratings for the own task less those for the other one."""


class _Rater(msgspec.Struct):
    """What is known of a rater: above `level` a rating is high. Groups with controls: the first, and the newest."""

    level: float
    first: list[_Counted] = []
    recent: list[_Counted] = []

    def add(self, counted: _Counted) -> None:
        if not self.is_known:
            self.first.append(counted)
            return
        self.recent = [*self.recent, counted][-_RECENT[-1] :]

    @property
    def is_known(self) -> bool:
        return len(self.first) >= _FIRST_CONTROLS and sum(group.high for group in self.first) >= _FIRST_HIGH


class _Rise(NamedTuple):
    z: float
    rater: str
    before: float
    now: float
    groups: int


class TaskBlindness(Check):
    """A rater rates high what it would also rate high as answers to another task, more often than at first.

    The scorer rates one group of eight for another task as well (`scoring.controls`). Of the samples that a rater
    rates high, the share p that it rates high for the other task too is what it pays for something else than the task:
    flattery, tampered tests, an answer that a judge obeys.

    In the first 64 groups there are ratings above their mean and others; a high one is above the middle between the
    means of the two. The first 24 groups with controls, and at least 40 samples rated high, are compared with the
    newest 6, 12, 24 and 48, as long as the score has not fallen, and ratings for the own task are on average no
    further above those for the other one: of a policy that learns they come to be, also where a rater is partly
    general, as a reward model is. The error of p is that of a ratio over groups, and at least that of independent
    samples; z is as rare as Student's t with as many degrees of freedom as groups allow. z > 3.5 and a rise of p by
    more than .08 warn, and no more follows: tasks that come to have the same answers, and a policy that learns a
    judge's taste, look the same. A rater with p > .4 at first, one of form for example, is left out. The value is
    z.
    """

    name = "task_blindness"

    def __init__(self) -> None:
        self._early: dict[str, list[float]] = {}  # by rater: its ratings in the first groups
        self._seen = 0
        self._levels: dict[str, float] = {}  # by rater, above it a rating is high
        self._raters: dict[str, _Rater] = {}

    def evaluate(self, window: HealthWindow) -> CheckResult:
        for score in window.scores:
            self._record(score)
        known = {name: rater for name, rater in self._raters.items() if rater.is_known}
        if not known:
            return CheckResult("idle", reason="too few answers were rated for another task (`scoring.controls`)")
        found = [rise for name, rater in known.items() for rise in _rises(name, rater)]
        worst = max(found, key=lambda rise: rise.z, default=None)
        if worst is None:
            return CheckResult("ok", 0.0, _WARN_Z)
        reason = (
            f"{worst.rater} pays for any task: of the answers that it rates high it also rated {worst.now:.2f} high as "
            f"answers to another task, {worst.before:.2f} at first (z = {worst.z:.1f}, {worst.groups} groups); what it "
            "rewards is no longer the task"
        )
        return CheckResult("warn", worst.z, _WARN_Z, reason, window.newest)

    def _record(self, score: GroupScore) -> None:
        if self._seen < _LEVEL_GROUPS:
            self._seen += 1
            for name, column in score.ratings.items():
                self._early.setdefault(name, []).extend(finite(column))
            return
        if self._early:
            self._levels = {name: _level(ratings) for name, ratings in self._early.items() if ratings}
            self._early = {}
        paid = mean(score.scores)
        for name, control in score.controls.items():
            if name in self._levels and paid is not None:
                rater = self._raters.setdefault(name, _Rater(self._levels[name]))
                rater.add(_count(score.ratings.get(name, []), control, rater.level, paid))

    def state_dict(self) -> dict[str, Any]:
        return {
            "early": self._early,
            "seen": self._seen,
            "levels": self._levels,
            "raters": msgspec.to_builtins(self._raters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._early = convert_plain("health state", dict[str, list[float]], state["early"])
        self._seen = convert_plain("health state", int, state["seen"])
        self._levels = convert_plain("health state", dict[str, float], state["levels"])
        self._raters = convert_plain("health state", dict[str, _Rater], state["raters"])


def _level(ratings: Sequence[float]) -> float:
    """Return the middle between the means of the ratings above their mean and of the others."""
    centre = math.fsum(ratings) / len(ratings)
    high = mean(value for value in ratings if value > centre)
    low = mean(value for value in ratings if value <= centre)
    return centre if high is None or low is None else (high + low) / 2


def _count(own: Sequence[float | None], control: Sequence[float | None], level: float, score: float) -> _Counted:
    """Return the counts of the samples that were rated for both tasks."""
    pairs = [(a, b) for a, b in zip(own, control, strict=False) if is_number(a) and is_number(b)]
    high = [b for a, b in pairs if a > level]
    return _Counted(len(high), sum(b > level for b in high), score, mean(a - b for a, b in pairs))


def _rises(name: str, rater: _Rater) -> Iterator[_Rise]:
    """Yield by how much p rose, for each number of newest groups in which that is beyond chance."""
    before, before_square = _share(rater.first)
    if before > _MAX_FIRST_SHARE:
        return
    for n in _RECENT:
        groups = rater.recent[-n:]
        rated = [group for group in groups if group.high]
        if len(groups) < n or len(rated) < _MIN_GROUPS or sum(group.high for group in rated) < _MIN_HIGH:
            continue
        now, square = _share(rated)
        z = student_z((now - before) / math.sqrt(square + before_square), len(rated) - 1)
        if z > _WARN_Z and now - before > _MIN_RISE and not (_fell(rater.first, groups) or _grew(rater.first, groups)):
            yield _Rise(z, name, before, now, len(rated))


def _share(groups: Sequence[_Counted]) -> tuple[float, float]:
    """Return the share of what is rated high that is rated high for another task too, with its squared error."""
    high = sum(group.high for group in groups)
    share = sum(group.both for group in groups) / high
    spread = sum((group.both - share * group.high) ** 2 for group in groups) / high**2 * len(groups) / (len(groups) - 1)
    likely = (share * high + 1) / (high + 2)  # an error of 0 where no sample is paid would be too sure
    return share, max(spread, likely * (1 - likely) / high)


def _grew(first: Sequence[_Counted], now: Sequence[_Counted]) -> bool:
    """Return whether ratings for the own task are further above those for the other one than at first."""
    before, after = (
        mean(one.gap for one in first if one.gap is not None),
        mean(one.gap for one in now if one.gap is not None),
    )
    return before is not None and after is not None and after > before


def _fell(first: Sequence[_Counted], now: Sequence[_Counted]) -> bool:
    """Return whether the score fell from the first groups to the newest, by more than its error."""

    def moments(groups: Sequence[_Counted]) -> tuple[float, float]:
        centre = sum(group.score for group in groups) / len(groups)
        return centre, sum((group.score - centre) ** 2 for group in groups) / (len(groups) - 1) / len(groups)

    (before, before_square), (after, after_square) = moments(first), moments(now)
    return before - after > math.sqrt(before_square + after_square)
