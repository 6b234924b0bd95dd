"""Scores a group by several raters at once, and measures how far raters agree, from plain lists. Pure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lachesis.pipeline.scorer.config import Aggregation, RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember, EnsembleScores
from lachesis.pipeline.scorer.logic.krippendorff import AlphaEstimate, CategoryAlpha, IntervalAlpha
from lachesis.pipeline.scorer.rater import Rating
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["RewardEnsemble", "krippendorff_alpha"]

Metric = Literal["interval", "nominal", "ordinal", "ratio"]


def krippendorff_alpha(ratings: Mapping[str, Sequence[float | None]], *, metric: Metric = "interval") -> AlphaEstimate:
    """Return Krippendorff's alpha of ratings of the same samples; None is a missing rating.

    `value` is None, and `reason` says why, where alpha is undefined: without variation it is not 1. Raises `DataError`
    on an invalid rating, `ConfigError` on columns of different lengths or an unknown metric.
    """
    alpha = IntervalAlpha() if metric == "interval" else CategoryAlpha(metric)
    for unit in zip(*_columns(ratings).values(), strict=True):
        alpha.add_unit(unit)
    return alpha.alpha()


class RewardEnsemble:
    """Several raters and the rule that joins their ratings: one of `ScoringConfig.aggregation`, or its default.

    `raters` has the lowest and highest rating of each. Agreement is counted over all groups that were scored.
    """

    def __init__(
        self,
        raters: Mapping[str, tuple[float, float]],
        *,
        aggregation: Aggregation | None = None,
        weights: Mapping[str, float] | None = None,
        quorum: int | None = None,
        **settings: Any,
    ) -> None:
        """Raise `ConfigError` where the raters, their bounds or the rule cannot be used.

        `settings`: the others of `ScoringConfig`: `penalty`, `trim`, `threshold`.
        """
        if aggregation == "reliability":
            raise ConfigError("aggregation reliability needs the run's history: use another rule in a loop of your own")
        if unknown := sorted((weights or {}).keys() - raters.keys()):
            raise ConfigError(f"weights names {unknown[0]!r}, which is no rater; there are {', '.join(raters)}")
        members = [
            EnsembleMember(
                name=name,
                reference=name,
                version="1",
                bounds=(float(low), float(high)),
                weight=(weights or {}).get(name, 1.0),
            )
            for name, (low, high) in raters.items()
        ]
        rows = [RaterConfig(rater=name) for name in raters]
        try:
            config = ScoringConfig(raters=rows, aggregation=aggregation, quorum=quorum, **settings)
        except TypeError as error:
            raise ConfigError(f"an ensemble: {error}; its settings are penalty, trim and threshold") from error
        self._ensemble = Ensemble(members, config)
        self._bounds = dict(raters)
        self._alpha = IntervalAlpha()

    def score(self, ratings: Mapping[str, Sequence[float | None]]) -> EnsembleScores:
        """Return the scores of one group, from the ratings of its samples by rater; None is a missing rating.

        A score is None where too few ratings are there. Raises `DataError` on a rater too many or too few, and on a
        rating outside of its rater's bounds.
        """
        for name, (low, high) in self._bounds.items():
            for value in ratings.get(name, ()):
                if isinstance(value, float | int) and not low <= value <= high and math.isfinite(value):
                    raise DataError(f"rater {name!r} gave {value!r}, and its bounds are {low:g} and {high:g}")
        found = self._ensemble.score(
            {
                name: [Rating(value, "ok" if value is not None else "abstain") for value in column]
                for name, column in ratings.items()
            }
        )
        for unit in zip(*found.ratings.values(), strict=True):
            self._alpha.add_unit(unit)
        return found

    @property
    def agreement(self) -> AlphaEstimate:
        """Krippendorff's alpha (interval) over all samples that were scored."""
        return self._alpha.alpha()


def _columns(ratings: Mapping[str, Sequence[float | None]]) -> Mapping[str, Sequence[float | None]]:
    if len({len(column) for column in ratings.values()}) > 1:
        lengths = {name: len(column) for name, column in ratings.items()}
        raise ConfigError(f"raters rated different numbers of samples: {lengths}; give None for a missing rating")
    return ratings
