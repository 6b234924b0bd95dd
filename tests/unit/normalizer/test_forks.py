"""Credit by branch: the formula by hand, and its gradient by exact enumeration, whatever the number of branches."""

import itertools

import numpy as np
import pytest

from lachesis.pipeline.normalizer.config.advantage import AdvantageConfig
from lachesis.pipeline.normalizer.estimators.loader import group_advantage
from lachesis.pipeline.normalizer.logic.turns import turn_advantages
from lachesis.schemas.errors import DataError


def test_the_formula_by_hand():
    """A trunk and two branches, of which one goes on; beside it a sample of two turns."""
    rewards, parents = [[1.0, 4.0, 2.0, 6.0], [0.0, 3.0]], [[-1, 0, 0, 1], [-1, 0]]
    trunk, first, second, further = 1 + ((4 + 6) + 2) / 2, 4 + 6, 2, 6
    found = turn_advantages([0.5, -0.5], rewards, parents, discount=1.0, estimator="rloo")
    branches = ((4 + 6) / 2 + 2 / 2) / (1 / 2 + 1 / 2)
    assert found == [
        [0.5 + trunk - 3, 0.5 + (first - second) / 2, 0.5 + (second - first) / 2, 0.5 + further / 2],
        [-0.5 + 3 - trunk, -0.5 + 3 - branches],
    ]
    halved = turn_advantages([0.0, 0.0], rewards, parents, discount=0.5, estimator="centred")
    assert halved[0][0] == ((1 + 0.5 * ((4 + 0.5 * 6) + 2) / 2) - 1.5) / 2


def test_branches_that_begin_a_sample_are_compared_with_each_other():
    found = turn_advantages([0.0, 0.0], [[1.0, 3.0], [5.0]], [[-1, -1], [-1]], discount=1.0, estimator="rloo")
    assert found == [[(1 - 3) / 2, (3 - 1) / 2], [5 - (1 + 3) / 2]]


def test_a_fork_of_a_fork_is_compared_with_its_nearest_relatives():
    parents = [[-1, 0, 0, 1, 1, 2]]  # two branches; the first forks again, the second goes on
    found = turn_advantages([0.0], [[0.0, 0.0, 0.0, 1.0, 3.0, 8.0]], parents, discount=1.0, estimator="rloo")
    assert found == [[(2 + 8) / 2, (2 - 8) / 2, (8 - 2) / 2, (1 - 3) / 4, (3 - 1) / 4, (8 - 2) / 2]]


def test_a_chain_given_by_its_parents_is_the_chain():
    rewards = [[1.0, -2.0, 0.5], [3.0], [0.25, 1.5]]
    chains = [list(range(-1, len(turns) - 1)) for turns in rewards]
    named = {"discount": 0.7, "estimator": "centred"}
    assert turn_advantages([0.0, 1.0, None], rewards, chains, **named) == turn_advantages(
        [0.0, 1.0, None], rewards, **named
    )
    with pytest.raises(DataError, match="turn_rewards: of 3 samples"):
        turn_advantages([0.0, 1.0, None], rewards, chains[:2], **named)


LOGITS = np.array([0.3, -0.6, 0.9, 0.2, -0.1])
"""Of looking closer in the first turn; of the better answer without that, and with it; of a third turn in each case."""
BRANCHES = {False: 1, True: 2}
"""How often the conversation goes on from the first turn, by what the policy did in it."""


def continuations(closer):
    """Return what may follow the first turn: choices (place in LOGITS, whether taken), rewards, outcome of the path."""
    at = 1 + closer
    return [
        ([(at, False)], [-1.0], 0.5 * closer),
        ([(at, True), (at + 2, False)], [2.0, -0.5], 1.0),
        ([(at, True), (at + 2, True)], [2.0, 1.5 + 2 * closer], 0.0),
    ]


def probability(choices):
    return np.prod([1 / (1 + np.exp(-LOGITS[at] if taken else LOGITS[at])) for at, taken in choices])


def score_function(at, taken):
    """Return the gradient of one choice's log-probability with respect to LOGITS."""
    gradient = np.zeros(len(LOGITS))
    gradient[at] = float(taken) - 1 / (1 + np.exp(-LOGITS[at]))
    return gradient


def samples():
    """Yield each possible sample: its probability, choices, rewards, parents, the mean outcome of its paths."""
    for closer, branches in BRANCHES.items():
        for paths in itertools.product(continuations(closer), repeat=branches):
            choices, rewards, parents = [(0, closer)], [0.25 * closer], [-1]
            for steps, gains, _ in paths:
                for n, (choice, gain) in enumerate(zip(steps, gains, strict=True)):
                    parents.append(len(choices) - 1 if n else 0)
                    choices.append(choice)
                    rewards.append(gain)
            yield probability(choices), choices, rewards, parents, np.mean([outcome for _, _, outcome in paths])


def expected_gradient(n, advantages_of):
    """Return the mean over all groups of `n` samples of the sum over turns of advantage times score function."""
    total = np.zeros(len(LOGITS))
    for group in itertools.product(list(samples()), repeat=n):
        chance = np.prod([sample[0] for sample in group])
        for sample, advantages in zip(group, advantages_of(group), strict=True):
            for choice, advantage in zip(sample[1], advantages, strict=True):
                total += chance * advantage * score_function(*choice)
    return total / n


def exact_gradient():
    """Return that of the expected rewards and outcome of one path, as if no conversation were ever forked."""
    total = np.zeros(len(LOGITS))
    for closer in BRANCHES:
        for steps, gains, outcome in continuations(closer):
            path = [(0, closer), *steps]
            gain = 0.25 * closer + sum(gains) + outcome
            total += probability(path) * gain * sum(score_function(*choice) for choice in path)
    return total


def outcomes(group):
    return group_advantage([sample[4] for sample in group], AdvantageConfig(estimator="rloo")).advantages


def ours(group):
    rewards, parents = [sample[2] for sample in group], [sample[3] for sample in group]
    return turn_advantages(outcomes(group), rewards, parents, discount=1.0, estimator="rloo")


def each_path_apart(group):
    """What is not done: each path is a sequence of its own, so what they share is counted once a path."""
    gains = []
    for _, choices, rewards, parents, _ in group:
        sums = []
        for leaf in set(range(len(choices))) - set(parents):
            path = [leaf]
            while parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            sums.append((path, sum(rewards[turn] for turn in path)))
        gains.append(sums)
    found = []
    for i, (own, sample) in enumerate(zip(outcomes(group), group, strict=True)):
        others = np.mean([gain for j, sums in enumerate(gains) if j != i for _, gain in sums])
        credit = np.zeros(len(sample[1]))
        for path, gain in gains[i]:
            credit[path] += own + gain - others
        found.append(credit)
    return found


def whole_branches(group):
    """What is not done either: all that branches gain is added up, and each of them counts in full."""
    return [
        [own + sum(reward for v, reward in enumerate(rewards) if follows(parents, v, u)) for u in range(len(choices))]
        for own, (_, choices, rewards, parents, _) in zip(outcomes(group), group, strict=True)
    ]


def follows(parents, turn, of):
    while turn > of:
        turn = parents[turn]
    return turn == of


@pytest.mark.parametrize("n", [2, 3])
def test_the_expected_gradient_is_that_of_one_path_whatever_the_number_of_branches(n):
    exact = exact_gradient()
    np.testing.assert_allclose(expected_gradient(n, ours), exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("naive", [each_path_apart, whole_branches])
def test_a_rule_that_counts_branches_is_biased(naive):
    exact, biased = exact_gradient(), expected_gradient(2, naive)
    assert abs(biased[0] / biased[1] - exact[0] / exact[1]) > 0.1  # it is not even a multiple of the right one
