"""Estimates raters' accuracy from verdicts alone: Dawid-Skene with one coin a rater.

From the raters' verdicts on each sample, yes or no, it estimates each rater's accuracy and the weight of its vote. With
these weights the aggregation "dawid_skene" chooses the more probable verdict. Dawid & Skene 1979, in the form where a
rater errs equally often on both sides; fitted by EM from the votes' shares, one right and one wrong verdict added to
each rater. Sums are exactly rounded, so neither the order of the samples nor that of the raters changes a bit.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lachesis.pipeline.common.number_arguments import listed
from lachesis.schemas.errors import DataError

__all__ = ["MIN_RATERS", "RaterAccuracy", "rater_accuracies"]

MIN_RATERS = 3
"""With two raters that differ it is unknown which one errs."""
_MAX_ROUNDS = 500
_CONVERGED_AT = 1e-12


class RaterAccuracy(NamedTuple):
    """`accuracy` in (0, 1), of `verdicts` many; `weight` = log(accuracy / (1 - accuracy)), below 0 if it misleads."""

    accuracy: float
    weight: float
    verdicts: int


def rater_accuracies(samples: Sequence[Mapping[str, bool]]) -> dict[str, RaterAccuracy]:
    """Return the accuracy of every rater.

    A sample maps raters to verdicts; a rater without one is left out of it.

    Samples with fewer than two verdicts are ignored. Raises `DataError` with fewer than three raters, and on an invalid
    verdict.
    """
    for sample in listed("sample", samples):
        if not isinstance(sample, Mapping) or not all(isinstance(verdict, bool) for verdict in sample.values()):
            raise DataError(f"a sample is {sample!r:.80}; give a table of verdicts, true or false, by rater.")
    judged = [sample for sample in samples if len(sample) > 1]
    raters = sorted({rater for sample in judged for rater in sample})
    if len(raters) < MIN_RATERS:
        raise DataError(f"accuracies need verdicts of {MIN_RATERS} raters or more, there are those of {raters}.")
    yes = [sum(sample.values()) / len(sample) for sample in judged]  # probability that the answer is yes
    accuracies: dict[str, float] = {}
    for _ in range(_MAX_ROUNDS):
        before = accuracies
        accuracies = {rater: _accuracy(rater, judged, yes) for rater in raters}
        weights = {rater: _log_odds(accuracies[rater]) for rater in raters}
        prior = _log_odds((math.fsum(yes) + 1) / (len(yes) + 2))
        yes = [_sigmoid(math.fsum([prior, *_votes(sample, weights)])) for sample in judged]
        if before and max(abs(accuracies[rater] - before[rater]) for rater in raters) < _CONVERGED_AT:
            break
    return {
        rater: RaterAccuracy(accuracies[rater], _log_odds(accuracies[rater]), sum(rater in sample for sample in judged))
        for rater in raters
    }


def _accuracy(rater: str, samples: Sequence[Mapping[str, bool]], yes: Sequence[float]) -> float:
    right = [p if sample[rater] else 1 - p for sample, p in zip(samples, yes, strict=True) if rater in sample]
    return (math.fsum(right) + 1) / (len(right) + 2)


def _votes(sample: Mapping[str, bool], weights: Mapping[str, float]) -> list[float]:
    return [weights[rater] if verdict else -weights[rater] for rater, verdict in sample.items()]


def _log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
