"""Figures for a run's log: ratings, agreement and success rates of one environment. Pure."""

from lachesis.pipeline.scorer.logic.krippendorff import IntervalAlpha
from lachesis.schemas.annotations import GroupScore

__all__ = ["RaterAgreement"]

_GROUPS = 128
_Ratings = dict[str, tuple[float, int]]
"""By rater: the sum of its ratings, and how many they are."""


class RaterAgreement:
    """Over the newest groups: between `_GROUPS` and twice as many of them, once there are so many."""

    def __init__(self) -> None:
        self._older = self._newer = IntervalAlpha()
        self._spread_older = self._spread_newer = (0.0, 0)
        self._success_older = self._success_newer = (0.0, 0)
        self._ratings_older: _Ratings = {}
        self._ratings_newer: _Ratings = {}
        self._groups = 0

    def add_group(self, group: GroupScore) -> None:
        """Take in a scored group."""
        if self._groups % _GROUPS == 0:
            self._older, self._newer = self._newer, IntervalAlpha()
            self._spread_older, self._spread_newer = self._spread_newer, (0.0, 0)
            self._success_older, self._success_newer = self._success_newer, (0.0, 0)
            self._ratings_older, self._ratings_newer = self._ratings_newer, {}
        self._groups += 1
        if group.success is not None:
            total, count = self._success_newer
            self._success_newer = total + group.success, count + 1
        for rater, ratings in group.ratings.items():
            known = [rating for rating in ratings if rating is not None]
            total, count = self._ratings_newer.get(rater, (0.0, 0))
            self._ratings_newer[rater] = total + sum(known), count + len(known)
        if group.disagreement is None:
            return  # fewer than two raters
        for unit in zip(*group.ratings.values(), strict=True):
            self._newer.add_unit(unit)
        total, count = self._spread_newer
        self._spread_newer = total + group.disagreement[0], count + 1

    def metrics(self, env: str) -> dict[str, float]:
        """Return the agreement figures of the raters of one environment.

        They are `reward/{env}/reliability_alpha` (Krippendorff's, for interval data), `mean_disagreement` (mean
        standard deviation between the raters of a sample), `success` (share of samples that succeeded) and
        `rater/{name}` (mean rating of each). Undefined figures are left out.
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
        for rater in {**self._ratings_older, **self._ratings_newer}:
            parts = (self._ratings_older.get(rater, (0.0, 0)), self._ratings_newer.get(rater, (0.0, 0)))
            number = sum(part[1] for part in parts)
            if number:
                found[f"reward/{env}/rater/{rater}"] = sum(part[0] for part in parts) / number
        return found
