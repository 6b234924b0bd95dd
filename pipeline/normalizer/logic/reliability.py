"""Weights raters by how well each agreed with the others in an earlier window.

From the calibrated ratings of groups it computes residual columns, and from the variances of these columns the weights.
A residual is a rating minus the mean of the other raters' ratings of the sample; its mean, a rater's bias, does not
count. Weights are proportional to 1 / max(residual variance, floor). None is above half of all, so that no rater that
happens to lie in the middle decides alone. Raters that copy each other look reliable: two of them outvote one or two
independent ones, and are outvoted by three. So this is for ensembles whose raters fail independently.
"""

import math
from collections.abc import Mapping, Sequence

from lachesis.pipeline.common.number_arguments import check_kind, number_column, number_columns, plain_numbers
from lachesis.schemas.errors import DataError

__all__ = ["MAX_SHARE", "MIN_RESIDUAL_VARIANCE", "residuals", "shares", "weighted"]

MIN_RESIDUAL_VARIANCE = 1e-3
"""Smallest residual variance, of ratings in [0, 1]."""
MAX_SHARE = 0.5

Ratings = Mapping[str, Sequence[float | None]]


def residuals(ratings: Ratings) -> dict[str, list[float | None]]:
    """Return by rater, for each sample, its rating minus the mean of the others'.

    None where either is missing. Raises `DataError` unless the columns have equal length.
    """
    ratings = number_columns("rating", ratings)
    columns = list(zip(*ratings.values(), strict=True))
    found: dict[str, list[float | None]] = {}
    for name, own in ratings.items():
        found[name] = []
        for i, value in enumerate(own):
            present = [x for x in columns[i] if x is not None]
            if value is None or len(present) < 2:
                found[name].append(None)
            else:
                found[name].append(_residual(value, present))
    return found


def _residual(value: float, present: Sequence[float]) -> float:
    try:
        residual = value - (math.fsum(present) - value) / (len(present) - 1)
    except OverflowError:
        residual = math.inf
    if not math.isfinite(residual):
        raise DataError(f"ratings of a sample are {list(present)}; they are too large for their mean to be a number.")
    return residual


def shares(variances: Mapping[str, float]) -> dict[str, float]:
    """Return each rater's share of all weight, summing to 1, from the variance of its residuals.

    Raises `DataError` on a variance that is no number of 0 or more.
    """
    check_kind("the table of variances", variances, Mapping)
    if not variances or min(plain_numbers("variance", variances.values())) < 0:
        raise DataError(f"variances are {dict(variances)}; give one of 0 or more for each of one rater or more.")
    odds = {name: 1 / max(variance, MIN_RESIDUAL_VARIANCE) for name, variance in variances.items()}
    total = math.fsum(odds.values())
    best = max(odds, key=lambda name: odds[name])
    if len(odds) < 2 or odds[best] <= MAX_SHARE * total:
        return {name: value / total for name, value in odds.items()}
    rest = math.fsum(value for name, value in odds.items() if name != best)  # at most one can be above half
    return {name: MAX_SHARE if name == best else (1 - MAX_SHARE) * value / rest for name, value in odds.items()}


def weighted(ratings: Ratings, scores: Sequence[float | None], weights: Mapping[str, float]) -> list[float | None]:
    """Return the weighted mean of each sample's ratings among the raters present.

    None where `scores` has none. Raises `DataError` on columns of other lengths, and a rater without a positive weight.
    """
    ratings, scores = number_columns("rating", ratings), number_column("score", scores)
    if any(len(column) != len(scores) for column in ratings.values()):
        raise DataError(f"ratings: columns have another length than the {len(scores)} scores.")
    check_kind("the table of weights", weights, Mapping)
    if not ratings.keys() <= weights.keys() or not all(w > 0 for w in plain_numbers("weight", weights.values())):
        raise DataError(f"weights are {dict(weights)}; give a positive one for each of {sorted(ratings)}.")
    found: list[float | None] = []
    for i, score in enumerate(scores):
        present = [(weights[name], x) for name, column in ratings.items() if (x := column[i]) is not None]
        if score is None or not present:
            found.append(None)
        else:
            found.append(math.fsum(w * x for w, x in present) / math.fsum(w for w, _ in present))
    return found
