"""Figures for a run's log: ratings, agreement and success rates of one environment. Pure."""

from collections.abc import Mapping, Sequence

from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha
from lachesis.pipeline.scorer.logic.length_bias import LengthBias
from lachesis.schemas.annotations import GroupScore

__all__ = ["RaterAgreement"]

_GROUPS = 128
_MAX_FIGURES = 16
"""Figures of raters that are reported: those of the most samples. Rubrics of tasks may have any number."""
_Ratings = dict[str, tuple[float, int]]
"""By rater, or by its figure: the sum of its ratings, and how many they are."""


class RaterAgreement:
    """Over the newest groups: between `_GROUPS` and twice as many of them, once there are so many."""

    def __init__(self) -> None:
        self._older = self._newer = IntervalAlpha()
        self._spread_older = self._spread_newer = (0.0, 0)
        self._success_older = self._success_newer = (0.0, 0)
        self._ratings_older: _Ratings = {}
        self._ratings_newer: _Ratings = {}
        self._figures_older: _Ratings = {}
        self._figures_newer: _Ratings = {}
        self._length_older = self._length_newer = LengthBias()
        self._groups = 0

    def add_group(self, group: GroupScore) -> None:
        """Take in a scored group."""
        if self._groups % _GROUPS == 0:
            self._older, self._newer = self._newer, IntervalAlpha()
            self._spread_older, self._spread_newer = self._spread_newer, (0.0, 0)
            self._success_older, self._success_newer = self._success_newer, (0.0, 0)
            self._ratings_older, self._ratings_newer = self._ratings_newer, {}
            self._figures_older, self._figures_newer = self._figures_newer, {}
            self._length_older, self._length_newer = self._length_newer, LengthBias()
        self._groups += 1
        if group.success is not None:
            total, count = self._success_newer
            self._success_newer = total + group.success, count + 1
        _add(self._ratings_newer, group.ratings)
        _add(self._figures_newer, group.figures)
        self._length_newer.add_group(group)
        if group.disagreement is None:
            return  # fewer than two raters
        for unit in zip(*group.ratings.values(), strict=True):
            self._newer.add_unit(unit)
        total, count = self._spread_newer
        self._spread_newer = total + group.disagreement[0], count + 1

    def metrics(self, env: str) -> dict[str, float]:
        """Return the agreement figures of the raters of one environment.

        They are `reward/{env}/reliability_alpha` (Krippendorff's, for interval data), `mean_disagreement` (mean
        standard deviation between the raters of a sample), `success` (share of samples that succeeded), `rater/{name}`
        (mean rating of each), `rater/{name}/{figure}` (mean of what a rater says further) and `length_bias/{name}`
        (`LengthBias`). Undefined figures are left out.
        """
        both = IntervalAlpha()
        for part in (self._older, self._newer):
            both.merge(part)
        alpha, count = both.alpha().value, self._spread_older[1] + self._spread_newer[1]
        found = {} if alpha is None else {f"reward/{env}/reliability_alpha": alpha}
        if count:
            found[f"reward/{env}/mean_disagreement"] = (self._spread_older[0] + self._spread_newer[0]) / count
        successes = self._success_older[1] + self._success_newer[1]
        if successes:
            found[f"reward/{env}/success"] = (self._success_older[0] + self._success_newer[0]) / successes
        ratings = _merged(self._ratings_older, self._ratings_newer)
        figures = sorted(_merged(self._figures_older, self._figures_newer).items(), key=lambda one: -one[1][1])
        for name, (total, number) in [*ratings.items(), *figures[:_MAX_FIGURES]]:
            if number:
                found[f"reward/{env}/rater/{name}"] = total / number
        for rater, bias in self._length_older.merged(self._length_newer).items():
            found[f"reward/{env}/length_bias/{rater}"] = bias
        return found


def _add(sums: _Ratings, columns: Mapping[str, Sequence[float | None]]) -> None:
    for name, column in columns.items():
        known = [value for value in column if value is not None]
        total, count = sums.get(name, (0.0, 0))
        sums[name] = total + sum(known), count + len(known)


def _merged(older: _Ratings, newer: _Ratings) -> _Ratings:
    parts = {name: (older.get(name, (0.0, 0)), newer.get(name, (0.0, 0))) for name in {**older, **newer}}
    return {name: (a[0] + b[0], a[1] + b[1]) for name, (a, b) in parts.items()}
