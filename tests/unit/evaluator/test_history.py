"""First, newest and best; falls that are reported, and those that are chance."""

import numpy as np
import pytest

from lachesis.pipeline.evaluator.logic.history import EvaluationHistory
from lachesis.schemas.codec import decode, encode
from lachesis.schemas.errors import SchemaError


def of(*events):
    return EvaluationHistory.of(events)


def test_first_newest_and_best(evaluation):
    folded = of(*(evaluation(step, [rate] * 8) for step, rate in [(0, 0.25), (10, 0.75), (20, 0.5)]))
    env = folded.envs["sums"]
    assert [event.policy_step for event in (env.first, env.newest, env.best)] == [0, 20, 10]
    assert str(folded.best) == "10-a-d10"


def test_of_equals_the_newest_is_best_and_repeats_change_nothing(evaluation):
    events = [evaluation(step, [0.5] * 8) for step in (0, 10)]
    folded = of(*events)
    assert folded.best.step == 10
    assert [folded.record(event) for event in events] == [False, False]
    assert folded.envs["sums"].newest.policy_step == 10


def test_the_best_is_judged_by_the_tasks_in_common(evaluation):
    """A shorter evaluation on easy tasks has the higher rate, and is worse on each of them."""
    folded = of(evaluation(0, [1.0] * 4 + [0.0] * 4), evaluation(10, [0.75] * 4))
    assert folded.envs["sums"].newest.avg > folded.envs["sums"].first.avg
    assert folded.best.step == 0


def test_with_several_environments_the_mean_decides_once_all_are_evaluated(evaluation):
    folded = of(evaluation(0, [0.5] * 8), evaluation(0, [0.5] * 8, env="words"))
    assert folded.best.step == 0
    folded.record(evaluation(10, [1.0] * 8))
    assert folded.best.step == 0, "words was not evaluated yet"
    folded.record(evaluation(10, [0.25] * 8, env="words"))
    assert folded.best.step == 10
    folded.record(evaluation(20, [1.0] * 8))
    folded.record(evaluation(30, [1.0] * 8, env="words"))
    assert folded.best.step == 10, "no policy was evaluated on both since"
    assert folded.envs["words"].best.avg == 0.25


def test_the_sentence_of_a_fall(evaluation):
    (fall,) = of(evaluation(0, [0.5, 0.25] * 10), evaluation(10, [0.0] * 20)).falls()
    said = (
        "the held-out rate of sums fell from 0.38 to 0.00 (difference -0.38 +- 0.03 on 20 tasks) between step 0 and 10"
    )
    assert fall.describe() == said
    assert fall.describe((0.28, 0.78)) == f"{said}, while the training reward rose from 0.28 to 0.78"
    assert fall.describe((0.78, 0.28)) == f"{said}, and the training reward fell from 0.78 to 0.28"


def test_a_fall_below_the_best_is_told_too_and_a_recovery_ends_it(evaluation):
    folded = of(evaluation(0, [0.25] * 20), evaluation(10, [1.0] * 20), evaluation(20, [0.5, 0.25] * 10))
    (fall,) = folded.falls()
    assert (fall.since_step, fall.step) == (10, 20)
    folded.record(evaluation(30, [1.0] * 20))
    assert folded.falls() == []


def test_no_fall_without_a_second_evaluation_or_an_error(evaluation):
    assert of(evaluation(0, [0.5] * 8)).falls() == []
    old = [
        evaluation(step, [rate] * 8).replace(error=None, tasks=[], task_successes=[], task_judged=[])
        for step, rate in [(0, 1.0), (10, 0.0)]
    ]
    assert of(*old).falls() == []


@pytest.mark.slow
def test_rates_that_do_not_change_seldom_look_as_if_they_fell(evaluation):
    rng = np.random.default_rng(1)
    alarms = 0
    for _ in range(300):  # runs of a first and ten further evaluations
        ability = rng.beta(0.7, 0.7, 100)
        folded = EvaluationHistory.of()
        fallen = False
        for step in range(0, 110, 10):
            tasks = ability if step in {0, 100} else ability[:50]
            folded.record(evaluation(step, (rng.binomial(4, tasks) / 4).tolist()))
            fallen = fallen or bool(folded.falls())
        alarms += fallen
    assert alarms <= 9


def test_an_evaluation_whose_columns_do_not_fit_is_refused_and_an_old_one_is_read(evaluation):
    event = evaluation(0, [0.5] * 8)
    assert decode(type(event), encode(event)) == event
    for wrong in ({"task_judged": [4]}, {"task_successes": [5] * 8}, {"error": -0.1}, {"policy_version": "x"}):
        with pytest.raises(SchemaError):
            decode(type(event), encode(event.replace(**wrong)))
