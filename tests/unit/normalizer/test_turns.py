"""Rewards of turns: the formula by hand, its gradient by exact enumeration, and what they do not go with."""

import itertools

import numpy as np
import pytest

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.config.normalization import NormalizationConfig
from lachesis.pipeline.normalizer.config.shaping import RewardConfig
from lachesis.pipeline.normalizer.estimators.loader import describe_estimator, group_advantage
from lachesis.pipeline.normalizer.logic.normalizer import ReadyGroup
from lachesis.pipeline.normalizer.logic.reward import KEY, RewardRule
from lachesis.pipeline.normalizer.logic.snapshot import NormalizationSnapshot
from lachesis.pipeline.normalizer.logic.turns import TURN_ESTIMATORS, turn_advantages
from lachesis.schemas.annotations import GroupScore
from lachesis.schemas.errors import ConfigError, DataError


def test_the_formula_by_hand_for_samples_of_different_length():
    """Returns at a discount of 1/2: [2, 2], [0.5, 1], [3], and [9], whose sample has no reward."""
    rewards, outcome = [[1.0, 2.0], [0.0, 1.0], [3.0], [9.0]], [0.5, -0.25, -0.25, None]
    found = turn_advantages(outcome, rewards, discount=0.5, estimator="rloo")
    assert found == [
        [0.5 + 2 - (0.5 + 3) / 2, 0.5 + 2 - 1],
        [-0.25 + 0.5 - (2 + 3) / 2, -0.25 + 1 - 2],
        [-0.25 + 3 - (2 + 0.5) / 2],
        None,
    ]
    scaled = turn_advantages([0.0, 0.0, 0.0, None], rewards, discount=0.5, estimator="centred")
    assert scaled[0] == pytest.approx([(2 - 1.75) * 2 / 3, (2 - 1) * 2 / 3], abs=1e-15)
    alone = turn_advantages([0.0, 0.0], [[1.0], [0.0, 7.0]], discount=1.0, estimator="rloo")
    assert alone[1][1] == 7.0, "no other sample has a second turn, so its return has no baseline"


@pytest.mark.parametrize("estimator", TURN_ESTIMATORS)
def test_of_samples_of_one_turn_it_is_the_same_whether_sample_or_turn_has_the_reward(estimator):
    rewards = [0.25, 1.0, -3.0, 0.5]
    wanted = group_advantage(rewards, AdvantageConfig(estimator=estimator)).advantages
    found = turn_advantages([0.0] * 4, [[r] for r in rewards], discount=0.3, estimator=estimator)
    assert [turns[0] for turns in found] == pytest.approx(wanted, abs=1e-12)


LOGITS = np.array([0.3, -0.4, 0.8, 0.1])
"""Of going on after the first turn; of the better answer in the second turn; the others, at the same places, of two
further turns."""
EPISODES = {
    # the choices (place in LOGITS, whether taken), the rewards of the turns, the reward of the sample
    "stops": ([(0, False)], [0.5], 1.0),
    "good": ([(0, True), (1, True), (2, False)], [1.0, 2.0, -1.0], 0.0),
    "poor": ([(0, True), (1, False)], [1.0, -1.0], 0.5),
    "long": ([(0, True), (1, True), (2, True), (3, True)], [1.0, 2.0, 1.0, 3.0], 2.0),
    "lost": ([(0, True), (1, True), (2, True), (3, False)], [1.0, 2.0, 1.0, -4.0], 2.0),
}


def probability(choices):
    return np.prod([1 / (1 + np.exp(-LOGITS[at] if taken else LOGITS[at])) for at, taken in choices])


def score_function(at, taken):
    """Return the gradient of one choice's log-probability with respect to LOGITS."""
    gradient = np.zeros(len(LOGITS))
    gradient[at] = float(taken) - 1 / (1 + np.exp(-LOGITS[at]))
    return gradient


def expected_gradient(n, advantages_of):
    """Return the mean over all groups of `n` samples of the sum over turns of advantage times score function."""
    total = np.zeros(len(LOGITS))
    for group in itertools.product(EPISODES.values(), repeat=n):
        chance = np.prod([probability(choices) for choices, _, _ in group])
        for (choices, _, _), advantages in zip(group, advantages_of(group), strict=True):
            for choice, advantage in zip(choices, advantages, strict=True):
                total += chance * advantage * score_function(*choice)
    return total / n


def exact_gradient():
    return sum(
        probability(choices) * (sum(turns) + reward) * sum(score_function(*choice) for choice in choices)
        for choices, turns, reward in EPISODES.values()
    )


def ours(group):
    outcome = group_advantage([reward for _, _, reward in group], AdvantageConfig(estimator="rloo")).advantages
    return turn_advantages(outcome, [turns for _, turns, _ in group], discount=1.0, estimator="rloo")


def centred_by_turn(group):
    """What is not done: each reward less its turn's mean over the samples that have it, then summed."""
    outcome = group_advantage([reward for _, _, reward in group], AdvantageConfig(estimator="rloo")).advantages
    length = max(len(turns) for _, turns, _ in group)
    means = [np.mean([turns[k] for _, turns, _ in group if len(turns) > k]) for k in range(length)]
    return [
        [own + sum(r - means[j] for j, r in enumerate(turns) if j >= k) for k in range(len(turns))]
        for own, (_, turns, _) in zip(outcome, group, strict=True)
    ]


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_expected_gradient_is_that_of_all_rewards_whatever_the_numbers_of_turns(n):
    exact = exact_gradient()
    np.testing.assert_allclose(expected_gradient(n, ours), exact, rtol=0, atol=1e-12)
    biased = expected_gradient(n, centred_by_turn)  # it is not even a multiple of the right one
    assert abs(biased[0] / biased[1] - exact[0] / exact[1]) > 0.1


def reward_of(scores, turns, config=None):
    score = GroupScore(group="0" * 32, seq=1, item="i", policy_step=0, scores=scores, ratings={},
                       lengths=[1] * len(scores), turn_rewards=turns)  # fmt: skip
    snapshot = NormalizationSnapshot.build("e", 3, NormalizationConfig(mode="none"), {})
    rule = RewardRule(config or AdvantageConfig(), RewardConfig())
    return rule.reward(ReadyGroup(score.group, 1, {KEY: score.scores}, snapshot, 1), score)


def test_equal_samples_are_trained_where_their_turns_differ():
    found = reward_of([1.0, 1.0], [[0.0, 1.0], [1.0]])
    assert (found.verdict, found.advantages) == ("trainable", [0.0, 0.0])
    assert found.turn_advantages == [[0.0, 0.5], [0.0]]
    assert reward_of([1.0, 1.0], [[0.5], [0.5]]).verdict == "zero_variance"
    assert reward_of([1.0, 1.0], []).turn_advantages == []
    assert reward_of([1.0, None], [[1.0], [2.0]]).verdict == "unscorable", "one sample has nothing to be compared with"


def test_the_discount_is_that_of_the_configuration():
    found = reward_of([0.0, 0.0], [[0.0, 1.0], [0.0]], AdvantageConfig(estimator="rloo", turn_discount=0.25))
    assert found.turn_advantages == [[0.25, 1.0], [-0.25]]
    with pytest.raises(ConfigError, match=r"advantage.turn_discount is 1.5; it must be between 0 and 1"):
        AdvantageConfig(turn_discount=1.5)
    assert describe_estimator(AdvantageConfig(turn_discount=0.25))["turn_discount"] == 0.25


@pytest.mark.parametrize("estimator", ["grpo", "maxrl", "opo", "reinforce++-baseline", "pass@k"])
def test_an_estimator_that_turns_do_not_go_with_is_named(estimator):
    found = reward_of([1.0, 0.0], [[1.0], [0.0]], AdvantageConfig(estimator=estimator))
    assert found.verdict == "quarantined"
    assert found.reason == (
        f"turn_rewards: estimator {estimator} does not go with rewards of turns; set advantage.estimator to centred, "
        "dr_grpo or rloo"
    )


def test_rewards_of_other_samples_are_refused():
    with pytest.raises(DataError, match="of 1 samples, where the group has 2"):
        turn_advantages([0.0, 0.0], [[1.0]], discount=1.0, estimator="rloo")
