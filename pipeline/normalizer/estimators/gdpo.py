"""gdpo: weighted sum of the grpo advantages of each rater, whitened (arXiv:2601.05242).

Whitening is over the batch.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from lachesis.pipeline.common.number_arguments import number_column
from lachesis.pipeline.normalizer.estimators.centred import Centred
from lachesis.pipeline.normalizer.estimators.estimator import (
    LIMIT,
    Column,
    Estimator,
    GroupAdvantage,
    rating_columns,
)
from lachesis.pipeline.normalizer.estimators.grpo import Grpo
from lachesis.schemas.errors import DataError

__all__ = ["Gdpo"]


class Gdpo(Centred):
    """A sample without a reward, or without one of the ratings, is unscorable and enters no statistic.

    The group has zero variance when every rater's ratings have.
    """

    name = "gdpo"
    within_range = False
    whitens = True

    def __init__(self, std_floor: float = 1e-3, weights: Mapping[str, float] | None = None) -> None:
        """`weights`: by rater; empty: every rater weighs 1."""
        super().__init__(std_floor)
        self._weights = dict(weights or {})

    def advantages(
        self, rewards: Column, lengths: Sequence[int] | None = None, ratings: Mapping[str, Column] | None = None
    ) -> GroupAdvantage:
        """Return the weighted sum. Raises `DataError` where a rater has no column for the group."""
        rewards, columns = number_column("reward", rewards, largest=LIMIT), rating_columns(ratings)
        weights = dict(sorted((self._weights or dict.fromkeys(columns, 1.0)).items()))
        absent = [name for name in weights if len(columns.get(name, ())) != len(rewards)]
        if absent or not weights:
            raise DataError(
                f"estimator gdpo needs ratings of {sorted(absent) or 'one rater at least'} for each of {len(rewards)} "
                f"samples; there are those of {sorted(columns)}."
            )
        scored = [None not in sample for sample in zip(rewards, *(columns[name] for name in weights), strict=True)]

        def advantages_of(column: Column, estimator: Estimator) -> GroupAdvantage:
            return estimator.advantages([value if ok else None for value, ok in zip(column, scored, strict=True)])

        whole = advantages_of(rewards, Centred(self.std_floor))
        if whole.verdict == "unscorable":
            return whole
        parts = [(weight, advantages_of(columns[name], Grpo(self.std_floor))) for name, weight in weights.items()]
        constant = all(part.verdict == "zero_variance" for _, part in parts)
        weighted = [[weight * (value or 0.0) for value in part.advantages] for weight, part in parts]
        summed = [math.fsum(values) if ok else None for ok, *values in zip(scored, *weighted, strict=True)]
        return msgspec.structs.replace(
            whole, advantages=tuple(summed), verdict="zero_variance" if constant else "trainable"
        )
