"""How far the raters of one environment agree: figures for a run's log. Pure."""

from lachesis.pipeline.scoring.logic.krippendorff import IntervalAlpha
from lachesis.schemas.annotations import GroupScore

__all__ = ["Agreement"]

_GROUPS = 128


class Agreement:
    """Over the newest groups: between `_GROUPS` and twice as many of them, once there are so many."""

    def __init__(self) -> None:
        self._older = self._newer = IntervalAlpha()
        self._spread_older = self._spread_newer = (0.0, 0)
        self._groups = 0

    def add(self, group: GroupScore) -> None:
        """Take in a scored group."""
        if group.disagreement is None:
            return  # fewer than two raters
        if self._groups % _GROUPS == 0:
            self._older, self._newer = self._newer, IntervalAlpha()
            self._spread_older, self._spread_newer = self._spread_newer, (0.0, 0)
        self._groups += 1
        for unit in zip(*group.ratings.values(), strict=True):
            self._newer.add(unit)
        total, count = self._spread_newer
        self._spread_newer = total + group.disagreement[0], count + 1

    def metrics(self, env: str) -> dict[str, float]:
        """Return `reward/{env}/reliability_alpha`, Krippendorff's for interval data, and `mean_disagreement`.

        The latter is the mean standard deviation between the raters of a sample. What is not defined is left out.
        """
        both = IntervalAlpha()
        for part in (self._older, self._newer):
            both.merge(part)
        alpha, count = both.alpha().value, self._spread_older[1] + self._spread_newer[1]
        found = {} if alpha is None else {f"reward/{env}/reliability_alpha": alpha}
        if count:
            found[f"reward/{env}/mean_disagreement"] = (self._spread_older[0] + self._spread_newer[0]) / count
        return found
