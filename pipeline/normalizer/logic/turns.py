"""Advantages of turns, of the rewards of single turns and the advantage of the sample. Pure float64.

Turn k of K_i in sample i of a group of n samples has the reward r_ik, the discount is g (`advantage.turn_discount`):

    return      G_ik = sum over j = k .. K_i - 1 of  g^(j - k) r_ij
    baseline    b_ik = mean of G_sk over the other samples s that have a turn k; 0 if there is none
    advantage   A_ik = A_i + c (G_ik - b_ik),   c = 1 for rloo, (n - 1) / n for centred and dr_grpo

A_i is the advantage of the sample's reward, as without rewards of turns, so that a reward which belongs to no turn
credits all turns. c is the estimator's own factor: samples of one turn get the same advantages whether a reward is that
of the sample or of its turn. Rewards of turns are not normalized: they count in units of the normalized reward.

The structure is that of MT-GRPO (arXiv:2505.11821): rewards of turns are compared at the same turn index, in addition
to the outcome. Unlike there, what is compared is the return, and the baseline leaves the sample itself out. With g = 1
the gradient is then that of E[R + sum_k r_k], times c, whatever the numbers of turns are: b_ik depends on other samples
alone, so E[b_ik grad log pi(turn k)] = 0, and each turn has one baseline, that of its own return. A sum of rewards that
are each centred by turn has no such proof: the number of baselines in it depends on where the sample stopped, which is
an action of the policy, so each further turn is paid for or against (verl#7244). With g < 1 later rewards count less,
which lowers the variance and changes what is optimized.
"""

import math
from collections.abc import Sequence

from lachesis.schemas.errors import DataError

__all__ = ["TURN_ESTIMATORS", "returns_by_turn", "turn_advantages"]

TURN_ESTIMATORS = ("centred", "dr_grpo", "rloo")
"""Estimators that rewards of turns go with; the others divide by what these are no part of, or whiten."""


def returns_by_turn(rewards: Sequence[float], discount: float) -> list[float]:
    """Return for each turn its reward and the discounted ones of all turns after it."""
    found, later = list[float](), 0.0
    for reward in reversed(rewards):
        later = reward + discount * later
        found.append(later)
    return found[::-1]


def turn_advantages(
    advantages: Sequence[float | None], rewards: Sequence[Sequence[float]], *, discount: float, estimator: str
) -> list[list[float] | None]:
    """Return for each sample the advantage of each of its turns, None where the sample has none.

    `advantages`: of the samples' rewards; a sample without one is in no baseline. `rewards`: of each sample's turns.
    Raises `DataError` for an estimator that rewards of turns do not go with, or if they are of other samples.
    """
    if estimator not in TURN_ESTIMATORS:
        raise DataError(
            f"turn_rewards: estimator {estimator} does not go with rewards of turns; set advantage.estimator to "
            f"{', '.join(TURN_ESTIMATORS[:-1])} or {TURN_ESTIMATORS[-1]}"
        )
    if len(rewards) != len(advantages):
        raise DataError(f"turn_rewards: of {len(rewards)} samples, where the group has {len(advantages)}")
    valid = [i for i, advantage in enumerate(advantages) if advantage is not None]
    returns = {i: returns_by_turn(rewards[i], discount) for i in valid}
    factor = 1.0 if estimator == "rloo" else (len(valid) - 1) / max(1, len(valid))
    return [
        None
        if advantage is None
        else [
            advantage + factor * (value - _mean([returns[s][k] for s in valid if s != i and len(returns[s]) > k]))
            for k, value in enumerate(returns[i])
        ]
        for i, advantage in enumerate(advantages)
    ]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
