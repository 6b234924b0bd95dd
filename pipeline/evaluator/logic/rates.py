"""Computes success rates on held-out tasks, their standard errors, and differences of rates. Pure.

The answers to one task are not independent: some tasks are easy and some are hopeless. So the unit of chance is the
task, and n answers each to N tasks are N observations, not n * N. The error of a rate is the cluster-robust one with
tasks as clusters (K.-Y. Liang and S. L. Zeger, Longitudinal data analysis using generalized linear models, Biometrika
73, 1986; for evaluations of language models E. Miller, Adding error bars to evals, arXiv:2411.00640, 2024). Two
evaluations of the same tasks are compared task by task, which takes the spread between tasks out of the difference
(Miller, section on paired differences).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lachesis.schemas.annotations import EvalEvent

__all__ = ["Difference", "TaskResult", "compare", "compare_tasks", "pass_at_k", "standard_error"]


class TaskResult(NamedTuple):
    """Of `judged` answers to a task, `succeeded` did."""

    succeeded: int
    judged: int

    @property
    def rate(self) -> float:
        """The share of successes. There is one only of a task with judged answers."""
        return self.succeeded / self.judged


class Difference(NamedTuple):
    """A rate's change by `value` from `before` to `after`, with its standard error.

    `tasks` counts those that both evaluations had and that were compared one by one; 0: the evaluations had no two
    tasks in common, and their errors were taken to be independent.
    """

    before: float
    after: float
    value: float
    error: float
    tasks: int


def standard_error(results: Sequence[TaskResult]) -> float | None:
    """Return the standard error of the success rate over tasks; None with fewer than two tasks.

    The rate is p = sum(s) / sum(m).

    With s_i successes of m_i judged answers to task i of N:
    sqrt(N / (N - 1) * sum((s_i - p m_i)^2)) / sum(m_i). Tasks without a judged answer are left out.
    """
    judged = [result for result in results if result.judged]
    if len(judged) < 2:
        return None
    answers = sum(result.judged for result in judged)
    rate = sum(result.succeeded for result in judged) / answers
    squares = math.fsum((result.succeeded - rate * result.judged) ** 2 for result in judged)
    return math.sqrt(len(judged) / (len(judged) - 1) * squares) / answers


def pass_at_k(results: Sequence[TaskResult], k: int) -> float | None:
    """Return the probability that one of `k` answers succeeds, the mean over tasks.

    None if no task has k judged answers. With c successes of n judged answers a task's estimate is
    1 - C(n - c, k) / C(n, k), which is unbiased for n >= k (M. Chen et al., Evaluating large language models trained on
    code, arXiv:2107.03374, 2021). Tasks with fewer judged answers than k are left out.
    """
    values = [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in results if n >= k]
    return math.fsum(values) / len(values) if values else None


def compare(before: EvalEvent, after: EvalEvent) -> Difference | None:
    """Return how the success rate changed between two evaluations; None if its error is unknown.

    If both have two or more tasks in common, those are compared (`compare_tasks`).
    """
    by_key = bool(before.task_keys and after.task_keys)
    paired = compare_tasks(_by_task(before, by_key=by_key), _by_task(after, by_key=by_key))
    if paired is not None:
        return paired
    if before.error is None or after.error is None:
        return None
    return Difference(before.avg, after.avg, after.avg - before.avg, math.hypot(before.error, after.error), 0)


def compare_tasks(before: Mapping[int, TaskResult], after: Mapping[int, TaskResult]) -> Difference | None:
    """Return how the success rate differs on the tasks that were judged in both.

    None with fewer than two of them. It is the mean of the differences of their rates, with the standard deviation of
    these over sqrt(tasks) as its error.
    """
    common = [task for task, result in after.items() if result.judged and task in before and before[task].judged]
    if len(common) < 2:
        return None
    return _paired([(before[task].rate, after[task].rate) for task in common])


def _paired(rates: Sequence[tuple[float, float]]) -> Difference:
    n = len(rates)
    changes = [after - before for before, after in rates]
    mean = math.fsum(changes) / n
    variance = math.fsum((change - mean) ** 2 for change in changes) / (n - 1)
    before, after = (math.fsum(column) / n for column in zip(*rates, strict=True))
    return Difference(before, after, mean, math.sqrt(variance / n), n)


def _by_task(event: EvalEvent, *, by_key: bool) -> Mapping[int, TaskResult]:
    columns = zip(event.task_keys if by_key else event.tasks, event.task_successes, event.task_judged, strict=True)
    return {task: TaskResult(succeeded, judged) for task, succeeded, judged in columns}
