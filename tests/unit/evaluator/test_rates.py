"""Rates and their errors: worked out by hand, and against simulations with a known answer."""

import math

import numpy as np
import pytest

from lachesis.pipeline.evaluator.logic.rates import TaskResult, compare, pass_at_k, rate_interval, standard_error


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


def test_an_interval_by_hand():
    """Wilson's interval of 5 of 10 is .2366 to .7634; of 0 of 10, 0 to .2775."""
    one_each = results(*[(1, 1)] * 5, *[(0, 1)] * 5)
    # its clustered error counts one observation fewer, so the number of tasks bounds it from below
    assert rate_interval(one_each) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    assert rate_interval(results(*[(0, 4)] * 10)) == pytest.approx((0.0, 0.27753), abs=1e-4)  # tasks, not answers
    assert rate_interval(results(*[(4, 4)] * 10)) == pytest.approx((0.72247, 1.0), abs=1e-4)
    assert rate_interval(results(*[(2, 4)] * 10)) == rate_interval(results(*[(1, 1)] * 20, *[(0, 1)] * 20))
    assert rate_interval(results((1, 1), (0, 0))) is None


@pytest.mark.parametrize("tasks", [20, 200])
@pytest.mark.parametrize("mean", [0.01, 0.05, 0.3, 0.98])
@pytest.mark.parametrize("alike", [0.3, 2.0, None])
def test_the_interval_holds_near_the_ends_where_rate_and_error_do_not(tasks, mean, alike):
    """Four answers to each task; the smaller `alike`, the more the answers to one task are the same."""
    rng = np.random.default_rng(1)
    held = wald = 0
    for _ in range(300):
        chances = np.full(tasks, mean) if alike is None else rng.beta(mean * alike, (1 - mean) * alike, tasks)
        found = results(*((int(count), 4) for count in rng.binomial(4, chances)))
        low, high = rate_interval(found)
        rate, error = sum(one.succeeded for one in found) / (4 * tasks), standard_error(found)
        held += low <= mean <= high
        wald += abs(rate - mean) <= 1.96 * error
    assert held / 300 >= 0.87
    if (tasks, mean) == (20, 0.01):
        assert wald / 300 < 0.6


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
