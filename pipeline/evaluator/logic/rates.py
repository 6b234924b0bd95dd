"""Computes success rates on held-out tasks, their errors, intervals and differences. Pure.

The answers to one task are not independent: some tasks are easy and some are hopeless. So the unit of chance is the
task, and n answers each to N tasks are N observations, not n * N. The error of a rate is the cluster-robust one with
tasks as clusters (K.-Y. Liang and S. L. Zeger, Longitudinal data analysis using generalized linear models, Biometrika
73, 1986; for evaluations of language models E. Miller, Adding error bars to evals, arXiv:2411.00640, 2024). Two
evaluations of the same tasks are compared task by task, which takes the spread between tasks out of the difference
(Miller, section on paired differences).

Near 0 and 1 a rate plus and minus its error is no interval: of a rate of 1 % it misses the truth one time in three, and
with no success at all the error is 0. `rate_interval` holds there too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lachesis.schemas.annotations import EvalEvent

__all__ = [
    "Difference",
    "TaskResult",
    "compare",
    "compare_tasks",
    "interval_of",
    "pass_at_k",
    "rate_interval",
    "standard_error",
]

_Z95 = 1.959964
"""Quantile of the normal distribution that 2.5 % lie beyond."""


class TaskResult(NamedTuple):
    """Of `judged` answers to a task, `succeeded` did."""

    succeeded: int
    judged: int

    @property
    def rate(self) -> float:
        """The share of successes. There is one only of a task with scored answers."""
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

    With s_i successes of m_i scored answers to task i of N:
    sqrt(N / (N - 1) * sum((s_i - p m_i)^2)) / sum(m_i). Tasks without a scored answer are left out.
    """
    judged = [result for result in results if result.judged]
    if len(judged) < 2:
        return None
    answers = sum(result.judged for result in judged)
    rate = sum(result.succeeded for result in judged) / answers
    squares = math.fsum((result.succeeded - rate * result.judged) ** 2 for result in judged)
    return math.sqrt(len(judged) / (len(judged) - 1) * squares) / answers


def rate_interval(results: Sequence[TaskResult]) -> tuple[float, float] | None:
    """Return the bounds of the success rate's 95 % interval, in [0, 1].

    None with fewer than two scored tasks. It is Wilson's score interval (E. B. Wilson, JASA 22, 1927) of as many
    independent answers as would have the rate's clustered error, p (1 - p) / error^2 (E. L. Korn and B. I. Graubard,
    Survey Methodology 24, 1998): at most all answers, at least the number of tasks (with unequal numbers m_i of answers
    sum(m)^2 / sum(m^2)), which is also what is taken where the error says nothing because all or none succeeded.
    """
    error = standard_error(results)
    if error is None:
        return None
    answers = sum(result.judged for result in results)
    rate = sum(result.succeeded for result in results) / answers
    fewest = answers**2 / sum(result.judged**2 for result in results)
    n = fewest
    if 0 < rate < 1:
        n = answers if error == 0 else min(max(rate * (1 - rate) / error**2, fewest), answers)
    centre = (rate + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z95**2 / (4 * n**2))
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def interval_of(event: EvalEvent) -> tuple[float, float] | None:
    """Return `rate_interval` of an evaluation; None where its tasks were not counted one by one."""
    return rate_interval([TaskResult(*row) for row in zip(event.task_successes, event.task_judged, strict=True)])


def pass_at_k(results: Sequence[TaskResult], k: int) -> float | None:
    """Return the probability that one of `k` answers succeeds, the mean over tasks.

    None if no task has k scored answers. With c successes of n scored answers a task's estimate is
    1 - C(n - c, k) / C(n, k), which is unbiased for n >= k (M. Chen et al., Evaluating large language models trained on
    code, arXiv:2107.03374, 2021). Tasks with fewer scored answers than k are left out.
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
    """Return how the success rate differs on the tasks that were scored in both.

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
