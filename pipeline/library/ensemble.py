"""Scores a group by several raters at once, and measures how far raters agree, from plain lists. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lachesis.pipeline.common.number_arguments import listed, number_columns, setting_number, table_of
from lachesis.pipeline.scorer.config import Aggregation, RaterConfig, ScoringConfig
from lachesis.pipeline.scorer.logic.aggregate import Ensemble, EnsembleMember, EnsembleScores
from lachesis.pipeline.scorer.logic.krippendorff import AlphaEstimate, CategoryAlpha, IntervalAlpha
from lachesis.pipeline.scorer.rater import Rating
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["RewardEnsemble", "krippendorff_alpha"]

Metric = Literal["interval", "nominal", "ordinal", "ratio"]


def krippendorff_alpha(
    ratings: Mapping[str, Sequence[float | str | None]], *, metric: Metric = "interval"
) -> AlphaEstimate:
    """Return Krippendorff's alpha of ratings of the same samples by rater; None is a missing rating.

    With the metric `nominal` ratings may also be names of categories. `value` is None, and `reason` says why, where
    alpha is undefined: without variation it is not 1. Raises `DataError` on an invalid rating and on columns of
    different lengths, `ConfigError` on an unknown metric.
    """
    if metric == "interval":
        alpha: IntervalAlpha | CategoryAlpha = IntervalAlpha()
    elif isinstance(metric, str) and metric in {"nominal", "ordinal", "ratio"}:
        alpha = CategoryAlpha(metric)
    else:
        raise ConfigError(f"metric is {metric!r:.80}; choose interval, nominal, ordinal or ratio.")
    columns = number_columns("rating", _numbered(ratings) if metric == "nominal" else ratings)
    for unit in zip(*columns.values(), strict=True):
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
        weights = _table("weights", {} if weights is None else weights)
        self._bounds = {name: _bounds(name, pair) for name, pair in _table("raters", raters).items()}
        if unknown := sorted(weights.keys() - self._bounds.keys()):
            raise ConfigError(f"weights names {unknown[0]!r}, which is no rater; there are {', '.join(self._bounds)}")
        members = [
            EnsembleMember(
                name=name,
                reference=name,
                version="1",
                bounds=bounds,
                weight=setting_number(f"the weight of {name}", weights.get(name, 1.0)),
            )
            for name, bounds in self._bounds.items()
        ]
        rows = [RaterConfig(rater=name) for name in self._bounds]
        try:
            config = ScoringConfig(raters=rows, aggregation=aggregation, quorum=quorum, **settings)
        except TypeError as error:
            raise ConfigError(f"an ensemble: {error}; its settings are penalty, trim and threshold") from error
        self._ensemble = Ensemble(members, config)
        self._alpha = IntervalAlpha()

    def score(self, ratings: Mapping[str, Sequence[float | None]]) -> EnsembleScores:
        """Return the scores of one group, from the ratings of its samples by rater; None is a missing rating.

        A score is None where too few ratings are there. Raises `DataError` on a rater too many or too few, and on a
        rating outside of its rater's bounds; then nothing is counted.
        """
        columns = number_columns("rating", ratings)
        for name, column in columns.items():
            low, high = self._bounds.get(name, (0.0, 0.0))
            for value in column:
                if value is not None and not low <= value <= high and name in self._bounds:
                    raise DataError(f"rater {name!r} gave {value!r}, and its bounds are {low:g} and {high:g}")
        found = self._ensemble.score(
            {
                name: [Rating(value, "ok" if value is not None else "abstain") for value in column]
                for name, column in columns.items()
            }
        )
        for unit in zip(*found.ratings.values(), strict=True):
            self._alpha.add_unit(unit)
        return found

    @property
    def agreement(self) -> AlphaEstimate:
        """Krippendorff's alpha (interval) over all samples that were scored, of ratings brought to [0, 1]."""
        return self._alpha.alpha()

    def state_dict(self) -> dict[str, Any]:
        """Return what agreement is counted from, as JSON can hold it."""
        return {"agreement": self._alpha.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count agreement on from what `state_dict` returned. Raises `DataError` on anything else."""
        state = table_of("state of an ensemble", state)
        self._alpha = IntervalAlpha.from_state_dict(state.get("agreement", {}))


def _table(what: str, table: Any) -> Mapping[str, Any]:
    try:
        return table_of(what, table)
    except DataError as error:
        raise ConfigError(str(error)) from error


def _bounds(name: str, pair: Any) -> tuple[float, float]:
    what = f"rater {name!r}: the bounds {pair!r:.80}"
    try:
        low, high = listed("bound", pair)
    except ValueError as error:  # also of a sequence of another length
        raise ConfigError(f"{what} are no pair; give its lowest and its highest rating.") from error
    return setting_number(f"{what}: one", low), setting_number(f"{what}: one", high)


def _numbered(ratings: Any) -> dict[str, list[Any]]:
    """Return the ratings with each category that is a text as the number of its place among these texts."""
    columns = {name: listed("rating", column) for name, column in table_of("ratings", ratings).items()}
    values = [value for column in columns.values() for value in column if value is not None]
    if not values or not all(isinstance(value, str) for value in values):
        return columns
    places = {text: place for place, text in enumerate(sorted(set(values)))}
    return {name: [None if value is None else places[value] for value in column] for name, column in columns.items()}
