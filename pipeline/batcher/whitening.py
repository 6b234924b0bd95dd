"""Whitens advantages over a batch.

The batcher does this for an estimator, since a single group cannot.

It takes the groups of a batch and, for groups to be whitened, the number of trained tokens of each sample. A sample
that its environment excludes has 0, so it enters neither mean nor deviation. It returns the same groups with whitened
advantages. Pure; every sum is exactly rounded (math.fsum), so the bits depend neither on the order of the groups nor on
when the batch was formed.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from lachesis.pipeline.common.number_arguments import check_kind, listed, plain_numbers
from lachesis.pipeline.normalizer.estimators.estimator import LIMIT, check_std_floor, checked_lengths
from lachesis.schemas.errors import DataError
from lachesis.schemas.ledger import GroupRef

__all__ = ["whiten", "whiten_batch"]


def whiten(advantages: Sequence[float], tokens: Sequence[int], std_floor: float = 1e-3) -> list[float]:
    """Subtract the mean and divide by the population standard deviation.

    Each sample is weighted by its number of tokens.

    REINFORCE++ (arXiv:2501.03262). Advantages lie within +-1e100. Raises DataError if no sample has tokens, if lengths
    differ, and on what is no advantage, no number of tokens or no floor.
    """
    advantages, tokens = plain_numbers("advantage", advantages, largest=LIMIT), checked_lengths(tokens)
    check_std_floor(std_floor)
    if len(advantages) != len(tokens) or any(t < 0 for t in tokens) or not sum(tokens):
        raise DataError(f"whitening needs a token count for each of {len(advantages)} advantages, and some tokens.")
    total = sum(tokens)
    mean = math.fsum(a * t for a, t in zip(advantages, tokens, strict=True)) / total
    centred = [a - mean for a in advantages]
    variance = math.fsum(c * c * t for c, t in zip(centred, tokens, strict=True)) / total
    divisor = max(math.sqrt(variance), std_floor)
    return [c / divisor for c in centred]


def whiten_batch(groups: Sequence[GroupRef], tokens: Mapping[int, Sequence[int]], std_floor: float) -> list[GroupRef]:
    """Return `groups` with the advantages of those in `tokens` whitened together.

    `tokens` holds, by sequence in ROLLOUTS, the tokens of each sample that are trained on. Samples without an
    advantage stay so and enter no sum. If no sample with an advantage has tokens there is nothing to train, and nothing
    is changed. Raises DataError where a group's token counts are not one for each of its samples.
    """
    for ref in listed("group", groups):
        check_kind("a group of a batch", ref, GroupRef)
    check_kind("the table of tokens", tokens, Mapping)
    check_std_floor(std_floor)
    kept: list[tuple[int, int]] = []  # group and sample of each value
    values: list[float] = []
    weights: list[int] = []
    for at, ref in enumerate(groups):
        if ref.seq not in tokens:
            continue
        for sample, (value, weight) in enumerate(zip(ref.advantages, _fitting(ref, tokens[ref.seq]), strict=True)):
            if value is not None:
                kept.append((at, sample))
                values.append(value)
                weights.append(weight)
    if not any(weights):
        return list(groups)
    whitened = [list(ref.advantages) for ref in groups]
    for (at, sample), value in zip(kept, whiten(values, weights, std_floor), strict=True):
        whitened[at][sample] = value
    return [msgspec.structs.replace(ref, advantages=new) for ref, new in zip(groups, whitened, strict=True)]


def _fitting(ref: GroupRef, tokens: Sequence[int]) -> Sequence[int]:
    tokens = checked_lengths(tokens)
    if len(tokens) != len(ref.advantages):
        raise DataError(f"group {ref.group}: {len(tokens)} token counts for {len(ref.advantages)} advantages.")
    return tokens
