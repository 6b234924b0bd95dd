"""Rates and their errors: worked out by hand, and against simulations with a known answer."""

import math

import numpy as np
import pytest

from lachesis.pipeline.evaluator.logic.rates import TaskResult, compare, pass_at_k, standard_error


def results(*pairs):
    return [TaskResult(*pair) for pair in pairs]


def test_a_case_by_hand():
    # p = 4/8; residuals 2, 0, -2 (and 0): sqrt(4/3 * 8) / 8
    assert standard_error(results((2, 2), (1, 2), (1, 2), (0, 2))) == pytest.approx(math.sqrt(4 / 3 * 2) / 8)


def test_answers_of_one_task_count_as_one_observation():
    few = standard_error(results(*[(1, 1), (0, 1)] * 10))
    many = standard_error(results(*[(100, 100), (0, 100)] * 10))
    assert few == pytest.approx(many)  # twenty tasks, however often each was answered


def test_unjudged_tasks_are_left_out_and_one_task_has_no_error():
    assert standard_error(results((1, 1), (0, 0))) is None
    assert standard_error([]) is None
    assert standard_error(results((1, 1), (0, 1), (0, 0))) == standard_error(results((1, 1), (0, 1)))
    assert standard_error(results((2, 2), (2, 2))) == 0.0


def test_the_error_is_that_of_repeated_evaluations():
    rng = np.random.default_rng(0)
    rates, errors = [], []
    for _ in range(2000):
        counts = rng.binomial(4, rng.beta(0.5, 0.5, 50))
        found = results(*((int(count), 4) for count in counts))
        rates.append(counts.sum() / 200)
        errors.append(standard_error(found))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(rates), rel=0.05)
    independent = np.sqrt(0.25 / 200)
    assert np.std(rates) > 1.5 * independent  # which taking the answers for independent would have said


def test_the_same_tasks_are_compared_one_by_one(evaluation):
    before = evaluation(0, [0.0, 0.25, 0.5, 0.75])
    after = evaluation(10, [0.25, 0.5, 0.75, 1.0])
    change = compare(before, after)
    assert (change.value, change.error, change.tasks) == (0.25, 0.0, 4)
    assert math.hypot(before.error, after.error) > 0.2


def test_a_shorter_evaluation_is_compared_on_the_tasks_it_has(evaluation):
    change = compare(evaluation(0, [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), evaluation(10, [0.5, 0.0]))
    assert (change.before, change.after, change.value, change.tasks) == (1.0, 0.25, -0.75, 2)
    assert change.error == pytest.approx(0.25)


def test_other_tasks_are_compared_by_independent_errors(evaluation):
    before, after = evaluation(0, [1.0, 0.0, 0.0, 0.0]), evaluation(10, [1.0, 1.0, 0.0, 0.0], first_task=100)
    change = compare(before, after)
    assert (change.value, change.tasks) == (0.25, 0)
    assert change.error == pytest.approx(math.hypot(before.error, after.error))


def test_an_event_of_an_older_build_is_compared_with_nothing(evaluation):
    old = evaluation(0, [1.0, 0.0]).replace(error=None, tasks=[], task_successes=[], task_judged=[])
    assert compare(old, evaluation(10, [0.0, 0.0])) is None


def test_pass_at_k_by_hand():
    # of 4 answers 1 right: two of them hold it in 3 of 6 ways; of 2 answers none right; the third has too few
    found = results((1, 4), (0, 2), (1, 1))
    assert pass_at_k(found, 2) == pytest.approx((0.5 + 0.0) / 2)
    assert pass_at_k(found, 1) == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert pass_at_k(found, 5) is None


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    truth = rng.beta(0.5, 0.5, 20)
    estimates = [pass_at_k(results(*((int(c), 6) for c in rng.binomial(6, truth))), 3) for _ in range(2000)]
    assert np.mean(estimates) == pytest.approx(np.mean(1 - (1 - truth) ** 3), abs=0.005)
