"""The posterior of a difficulty against integrals that share no code with it."""

import math

import numpy as np
import pytest

from lachesis.pipeline.curriculum.config import CurriculumConfig
from lachesis.pipeline.curriculum.logic.irt import OnlineIRT
from lachesis.pipeline.curriculum.logic.posterior import Evidence, integrate
from lachesis.pipeline.curriculum.logic.strategy import ItemFeedback, ItemPool

STEP = 0.005
X = np.arange(-45.0, 45.0, STEP)


def log_likelihood(ability, passes, failures):
    """Of a result at every difficulty of X."""
    return -passes * np.logaddexp(0.0, X - ability) - failures * np.logaddexp(0.0, ability - X)


def random_history(rng, *, moves):
    """Between 1 and 12 results at abilities that move; half of the items are easy or hard throughout."""
    ability, difficulty = rng.normal(0.0, 1.5), rng.normal(0.0, 3.0)
    for _ in range(rng.integers(1, 13)):
        samples = int(rng.choice([2, 8, 16, 64]))
        passed = int(rng.binomial(samples, 1 / (1 + math.exp(difficulty - ability))))
        if rng.random() < 0.2:
            passed = samples - passed  # a result that contradicts the others
        yield ability, passed, samples - passed
        ability += rng.normal(0.0, moves)


@pytest.mark.parametrize("seed", range(40))
def test_integrals_agree_with_a_fine_grid(seed):
    rng = np.random.default_rng(seed)
    mean, deviation = rng.normal(0.0, 2.0), float(rng.choice([0.5, 2.0, 5.0]))
    results = list(random_history(rng, moves=0.5))
    prior = -0.5 * ((X - mean) / deviation) ** 2
    log = prior + sum(log_likelihood(*one) for one in results)
    found = integrate(mean, deviation, *(Evidence(passes, at, failures, at) for at, passes, failures in results))
    assert found.mode == pytest.approx(X[log.argmax()], abs=0.0051)
    top = slice(log.argmax() - 40, log.argmax() + 41)
    assert found.variance == pytest.approx(-0.5 / np.polyfit(X[top] - X[log.argmax()], log[top], 4)[2], rel=0.005)
    evidence = log.max() + math.log(np.exp(log - log.max()).sum() / np.exp(prior).sum())
    assert found.log_evidence == pytest.approx(evidence, abs=1e-6)


def errors_of_success(seed, wander, moves):
    """Return how far a strategy's expected success of an item is, after each result, from that of the exact filter:
    every result at its own ability, and a random walk of the difficulty between them."""
    rng = np.random.default_rng(seed)
    strategy = OnlineIRT(ItemPool(1), CurriculumConfig(wander=wander, chance=0.0))
    log = -(X**2) / 50.0
    half = int(6 * wander / STEP)
    walk = np.exp(-0.5 * (np.arange(-half, half + 1) * STEP / wander) ** 2) if half else None
    errors = []
    for n, (ability, passes, failures) in enumerate(random_history(rng, moves=moves)):
        if n and walk is not None:
            log = np.log(np.convolve(np.exp(log - log.max()), walk, "same") + 1e-300)
        log = log + log_likelihood(ability, passes, failures)
        density = np.exp(log - log.max())
        exact = (density / (1 + np.exp(X - ability))).sum() / density.sum()
        strategy.arrays()["ability"][0] = ability
        samples = passes + failures
        success = passes / samples
        strategy.observe(
            ItemFeedback(id=str(n), env="e", item=0, skill=None, n=samples, success=success, policy_step=0)
        )
        strategy.arrays()["ability"][0] = ability  # which the result moved
        errors.append(abs(strategy.success()[0] - exact))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(("wander", "moves"), [(0.0, 0.0), (0.0, 0.3), (0.15, 0.3)])
def test_expected_success_stays_near_that_of_the_exact_filter(wander, moves):
    histories = [errors_of_success(seed, wander, moves) for seed in range(60)]
    assert max(map(max, histories)) < 0.16, "a fifth of the results contradict the others"
    assert np.mean([error for errors in histories for error in errors]) < 0.03


@pytest.mark.parametrize(
    "evidence",
    [(1e12, 0.0, 3.0, 0.0), (3.0, 0.0, 1e15, 1.0), (1e15, -4.0, 1e15, 4.0), (1e-300, 0.0, 0.0, 0.0)],
)
@pytest.mark.parametrize("deviation", [1e-3, 5.0, 100.0])
def test_any_evidence_has_a_posterior(evidence, deviation):
    found = integrate(0.0, deviation, Evidence(*evidence))
    assert np.isfinite(found).all()
    assert 0.0 < found.variance <= deviation**2 * (1 + 1e-9)
