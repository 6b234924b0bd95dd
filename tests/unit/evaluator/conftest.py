"""Evaluations with rates of one's choice."""

import pytest

from lachesis.pipeline.evaluator.logic.rates import TaskResult, standard_error
from lachesis.schemas.annotations import EvalEvent


def make(step, rates, *, env="sums", k=4, first_task=0, lineage="a"):
    found = [TaskResult(round(rate * k), k) for rate in rates]
    return EvalEvent(
        run="r",
        env=env,
        revision="live",
        policy_version=f"{step}-{lineage}-d{step}",
        policy_step=step,
        items=len(rates),
        k=k,
        temperature=1.0,
        avg=sum(rates) / len(rates),
        error=standard_error(found),
        pass_at_k=sum(rate > 0 for rate in rates) / len(rates),
        tasks=list(range(first_task, first_task + len(rates))),
        task_successes=[result.succeeded for result in found],
        task_judged=[result.judged for result in found],
        started_ns=1000 + 10 * step,
        ended_ns=1005 + 10 * step,
    )


@pytest.fixture
def evaluation():
    return make
