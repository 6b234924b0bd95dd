"""Turns the ratings of a group into its scores.

From one `Rating` a sample and rater it computes one score a sample or None (unscorable), the calibrated ratings,
statuses and the disagreement between raters. A missing rating is left out, never taken for 0; a sample with fewer
ratings than the quorum is unscorable. Pure: the same ratings give the same bits.
"""

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import msgspec

from lachesis.pipeline.common.number_arguments import check_kind, listed
from lachesis.pipeline.scorer.config import Aggregation, ScoringConfig
from lachesis.pipeline.scorer.logic.accuracy import MIN_RATERS
from lachesis.pipeline.scorer.rater import Rating, check_bounds
from lachesis.schemas.errors import ConfigError, DataError

__all__ = ["Ensemble", "EnsembleMember", "EnsembleScores"]


class EnsembleMember(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a rater in an ensemble; `reference` is its built-in name or module:name."""

    name: str
    reference: str
    version: str
    bounds: tuple[float, float]
    weight: float = 1.0
    params: dict[str, Any] = {}


class EnsembleScores(NamedTuple):
    """Scores of one group. Lists have one entry a sample; None is missing.

    `ratings` are calibrated to [0, 1]. `statuses` holds only raters with a missing rating. `disagreement` is the (mean,
    maximum) over samples with two or more ratings of the population standard deviation between raters.
    """

    scores: list[float | None]
    ratings: dict[str, list[float | None]]
    statuses: dict[str, list[str]]
    disagreement: tuple[float, float] | None
    unscorable: list[int]
    """Samples below the quorum, or without a majority."""


class Ensemble:
    """Calibration, quorum and aggregation of some raters. `digest` names all that the scores depend on."""

    def __init__(self, members: Sequence[EnsembleMember], config: ScoringConfig) -> None:
        """Raises ConfigError without members, with two of one name or with a rule that needs more of them."""
        for member in listed("member", members):
            check_kind("a member of an ensemble", member, EnsembleMember)
            check_bounds(member.bounds, member.name)
            if not (_is_finite(member.weight) and member.weight > 0):
                raise ConfigError(
                    f"rater {member.name}: weight is {member.weight!r:.80}; it must be positive and finite."
                )
        check_kind("the configuration of an ensemble", config, ScoringConfig)
        names = [member.name for member in members]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"scoring.raters: needs one or more raters of different names, has {names}.")
        self.members = tuple(members)
        self.aggregation: Aggregation = config.aggregation or ("lcb" if len(names) >= 3 else "min")
        if self.aggregation in {"dawid_skene", "reliability"} and len(names) < MIN_RATERS:
            raise ConfigError(f"scoring.aggregation {self.aggregation} needs {MIN_RATERS} raters or more, has {names}.")
        self.quorum = (
            _default_quorum(self.aggregation, len(names), config.trim) if config.quorum is None else config.quorum
        )
        if self.quorum > len(names):
            raise ConfigError(f"scoring.quorum is {self.quorum}, but there are {len(names)} raters.")
        if self.aggregation == "trimmed" and _trimmed_away(self.quorum, config.trim) == 0:
            raise ConfigError(
                f"scoring.aggregation trimmed drops nothing of {self.quorum} ratings at a trim of {config.trim:g}: it "
                "is their mean. Use more raters and a higher quorum, a larger trim, or median."
            )
        self._config = config
        self._rule = _RULES.get(self.aggregation)
        self._vote_weights = _as_integers([member.weight for member in members])
        content = (1, self.members, self.aggregation, self.quorum, config.penalty, config.trim, config.threshold)
        self.digest = _digest(content)

    @property
    def versions(self) -> dict[str, str]:
        """Rater name -> version."""
        return {member.name: member.version for member in self.members}

    @property
    def rater_digests(self) -> dict[str, str]:
        """Rater name -> what names all that its ratings depend on: code, version, bounds and parameters."""
        return {member.name: _digest(msgspec.structs.replace(member, weight=1.0)) for member in self.members}

    def calibrate(self, ratings: Mapping[str, Sequence[Rating]]) -> dict[str, list[float | None]]:
        """Return ratings of some of the members, by rater, moved and scaled to [0, 1]."""
        return {
            member.name: _calibrated(ratings[member.name], member.bounds)
            for member in self.members
            if member.name in ratings
        }

    def score(self, ratings: Mapping[str, Sequence[Rating]]) -> EnsembleScores:
        """Aggregate the ratings of one group.

        Raises DataError on a rater too many or too few, or unequal lengths.
        """
        names = [member.name for member in self.members]
        if not isinstance(ratings, Mapping) or set(ratings) != set(names):
            given = sorted(map(str, ratings)) if isinstance(ratings, Mapping) else f"{ratings!r:.80}"
            raise DataError(f"ratings are of {given}, the ensemble is {names}.")
        ratings = {name: listed(f"rating of {name}", ratings[name]) for name in names}
        n = len(ratings[names[0]])
        if any(len(ratings[name]) != n for name in names):
            raise DataError(f"raters rated different numbers of samples: { {k: len(r) for k, r in ratings.items()} }.")
        calibrated = self.calibrate(ratings)
        samples = list(zip(*calibrated.values(), strict=True))
        present = [_present(sample) for sample in samples]
        moments = [_moments(x) for x in present]
        spreads = [math.sqrt(variance) for x, (_, variance) in zip(present, moments, strict=True) if len(x) > 1]
        if self.aggregation == "borda":
            ranks = [_centred_ranks(column) for column in calibrated.values()]
            present = [_present(sample) for sample in zip(*ranks, strict=True)]
            moments = [_moments(x) for x in present]
        scores = [self._score(*parts) for parts in zip(samples, present, moments, strict=True)]
        return EnsembleScores(
            scores=scores,
            ratings=calibrated,
            statuses={
                name: [rating.status for rating in ratings[name]]
                for name, column in calibrated.items()
                if None in column
            },
            disagreement=(math.fsum(spreads) / len(spreads), max(spreads)) if spreads else None,
            unscorable=[i for i, score in enumerate(scores) if score is None],
        )

    def _score(self, sample: Sequence[float | None], x: Sequence[float], moments: tuple[float, float]) -> float | None:
        """Return the score of a sample with ratings `sample`, of which `x` are present, with mean and variance."""
        if len(x) < self.quorum:
            return None
        if self._rule is not None:
            return self._rule(x, *moments, self._config)
        if self.aggregation == "dawid_skene":
            votes = [w for w, rating in zip(self._vote_weights, sample, strict=True) if rating is not None]
            return _weighted_majority(x, votes, self._config.threshold)
        weights = [m.weight for m, rating in zip(self.members, sample, strict=True) if rating is not None]
        return math.fsum(w * v for w, v in zip(weights, x, strict=True)) / math.fsum(weights)


def _digest(content: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=12).hexdigest()


def _default_quorum(aggregation: Aggregation, raters: int, trim: float) -> int:
    """Return how many ratings a sample needs: all for min, for trimmed as many as something is dropped of."""
    if aggregation == "min":
        return raters
    half = min(raters, max(2, (raters + 1) // 2))
    if aggregation != "trimmed":
        return half
    return next((present for present in range(half, raters) if _trimmed_away(present, trim)), raters)


def _trimmed_away(present: int, trim: float) -> int:
    """Return how many of the ratings present are dropped at each end."""
    return math.floor(trim * present)


def _as_integers(weights: Sequence[float]) -> list[int]:
    """Return integers in the proportions of the weights as they are written, so that .1 + .2 is as much as .3."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    return [int(weight * common) for weight in exact]


def _calibrated(column: Sequence[Rating], bounds: tuple[float, float]) -> list[float | None]:
    low, high = bounds
    width = high - low
    if {*map(type, column)} <= {Rating}:
        values = [rating.value for rating in column]
        if {*map(type, values)} <= {float} and all(map(math.isfinite, cast("list[float]", values))):
            return [(value - low) / width for value in cast("list[float]", values)]
    for rating in column:
        if not isinstance(rating, Rating) or not (rating.value is None or _is_finite(rating.value)):
            raise DataError(f"a rating is {rating!r:.80}; give a `Rating` of a finite number, or of None if missing.")
    return [None if rating.value is None else (rating.value - low) / width for rating in column]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _present(column: Sequence[float | None]) -> Sequence[float]:
    return cast("Sequence[float]", column) if None not in column else [x for x in column if x is not None]


def _centred_ranks(column: Sequence[float | None]) -> list[float | None]:
    """Mid-ranks among the samples rated, moved and scaled to [-0.5, 0.5]; comparable inside a group alone."""
    values = sorted(_present(column))
    n = len(values)
    if n < 2:
        return [None if x is None else 0.0 for x in column]
    rank: dict[float, float] = {}
    for value in set(values):
        first = values.index(value)
        rank[value] = first + (values.count(value) - 1) / 2
    return [None if x is None else rank[x] / (n - 1) - 0.5 for x in column]


def _moments(x: Sequence[float]) -> tuple[float, float]:
    """Return mean and population variance; 0 of nothing."""
    if not x:
        return 0.0, 0.0
    mean = math.fsum(x) / len(x)
    return mean, math.fsum([(v - mean) ** 2 for v in x]) / len(x)


def _mean(_x: Sequence[float], mean: float, _variance: float, _config: ScoringConfig) -> float:
    return mean


def _median(x: Sequence[float], _mean: float, _variance: float, _config: ScoringConfig) -> float:
    return statistics.median(x)


def _trimmed(x: Sequence[float], _mean: float, _variance: float, config: ScoringConfig) -> float:
    drop = _trimmed_away(len(x), config.trim)
    kept = sorted(x)[drop : len(x) - drop]
    return math.fsum(kept) / len(kept)


def _min(x: Sequence[float], _mean: float, _variance: float, _config: ScoringConfig) -> float:
    return min(x)


def _uwo(_x: Sequence[float], mean: float, variance: float, config: ScoringConfig) -> float:
    """Uncertainty-weighted optimisation (Coste et al. 2023, arXiv:2310.02743): mean - penalty * population variance."""
    return mean - (0.5 if config.penalty is None else config.penalty) * variance


def _lcb(x: Sequence[float], mean: float, variance: float, config: ScoringConfig) -> float:
    """Lower confidence bound: mean - penalty * population standard deviation.

    With 1 / sqrt(m - 1) it rises with every rating, and tends to the mean of the others as one goes to infinity.
    """
    penalty = config.penalty
    if penalty is None:
        penalty = 1 / math.sqrt(len(x) - 1) if len(x) > 1 else 0.0
    return mean - penalty * math.sqrt(variance)


def _majority(x: Sequence[float], _mean: float, _variance: float, config: ScoringConfig) -> float | None:
    yes = sum(v > config.threshold for v in x)
    return None if 2 * yes == len(x) else float(2 * yes > len(x))


def _weighted_majority(x: Sequence[float], weights: list[int], threshold: float) -> float | None:
    balance = sum(w if v > threshold else -w for v, w in zip(x, weights, strict=True))
    return None if balance == 0 else float(balance > 0)


_RULES: dict[str, Callable[[Sequence[float], float, float, ScoringConfig], float | None]] = {
    "mean": _mean,
    "median": _median,
    "trimmed": _trimmed,
    "min": _min,
    "uwo": _uwo,
    "lcb": _lcb,
    "majority": _majority,
    "borda": _mean,  # of the centred ranks
    "reliability": _mean,  # until the normalizer weighs them by what it knows
}
