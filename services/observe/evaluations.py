"""Shows held-out evaluations next to the training reward: for `up`, `status` and `top`. No bus.

Makes, from the folded evaluations and the figures in the run's folder, a row for each environment, lines of text, and a
warning for each environment whose rate fell.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from lachesis.pipeline.evaluator.logic.history import EnvEvaluations, EvaluationHistory
from lachesis.pipeline.evaluator.logic.rates import Difference, compare, interval_of
from lachesis.schemas.annotations import EvalEvent
from lachesis.services.observe.progress import training_rewards

__all__ = [
    "EvaluationStatus",
    "evaluation_line",
    "evaluation_rows",
    "evaluation_rows_of_figures",
    "evaluation_summary",
    "evaluation_warnings",
    "with_interval",
]


class EvaluationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest evaluation of an environment: `rate` is the mean success of sampled answers after optimizer step
    `step`, `error` its standard error, `low` to `high` its 95 % interval, `greedy` the rate at temperature 0.

    `first` and `best` are the rates of the first policy and of the run's best one on the tasks that it has in common
    with theirs; `change` is that from the first, with its standard error. None: not known, or there is no earlier one.
    """

    env: str
    step: int
    rate: float
    error: float | None
    low: float | None
    high: float | None
    items: int | None
    samples: int
    greedy: float | None
    first: float
    first_step: int
    change: float | None
    change_error: float | None
    best: float | None
    best_step: int | None


def evaluation_rows(evaluations: EvaluationHistory) -> list[EvaluationStatus]:
    """Return where each environment stands, in the order in which they were first evaluated."""
    return [_row(env) for env in evaluations.envs.values()]


def evaluation_rows_of_figures(figures: Mapping[str, float]) -> list[EvaluationStatus]:
    """Return the evaluation row of each environment from the figures of a step.

    They do not hold the number of tasks.
    """
    rows = []
    for name, rate in sorted(figures.items()):
        kind, _, rest = name.partition("/")
        env, _, measure = rest.rpartition("/")
        step = figures.get(f"eval/{env}/step")
        if kind == "eval" and measure.startswith("avg@") and step is not None:
            rows.append(
                EvaluationStatus(
                    env=env,
                    step=int(step),
                    rate=rate,
                    error=figures.get(f"eval/{env}/error"),
                    low=figures.get(f"eval/{env}/low"),
                    high=figures.get(f"eval/{env}/high"),
                    items=None,
                    samples=int(measure.removeprefix("avg@")),
                    greedy=figures.get(f"eval/{env}/greedy"),
                    first=rate,
                    first_step=int(step),
                    change=None,
                    change_error=None,
                    best=None,
                    best_step=None,
                )
            )
    return rows


def _row(env: EnvEvaluations) -> EvaluationStatus:
    newest, best = env.newest, env.best
    change = _change(env.first, newest)
    since_best = _change(best, newest) if best is not None else None
    low, high = interval_of(newest) or (None, None)
    return EvaluationStatus(
        env=newest.env,
        step=newest.policy_step,
        rate=newest.avg,
        error=newest.error,
        low=low,
        high=high,
        items=newest.items,
        samples=newest.k,
        greedy=newest.greedy,
        first=change.before if change else env.first.avg,
        first_step=env.first.policy_step,
        change=change.value if change else None,
        change_error=change.error if change else None,
        best=since_best.before if since_best else best.avg if best else None,
        best_step=best.policy_step if best else None,
    )


def _change(earlier: EvalEvent, newest: EvalEvent) -> Difference | None:
    return None if earlier.policy_version == newest.policy_version else compare(earlier, newest)


def evaluation_line(event: EvalEvent, first: EvalEvent) -> str:
    """Return the line that `up` prints for an evaluation, with the first result on the same tasks."""
    change = _change(first, event)
    since = "" if change is None else f" (first {change.before:.2f}: {change.value:+.2f} +- {change.error:.2f})"
    unjudged = f", {event.unjudged} answers not rated" if event.unjudged else ""
    tasks = f"{event.items} tasks, {event.k} answers each"
    rate = with_interval(event.avg, interval_of(event))
    return f"held-out {event.env}: {rate} after step {event.policy_step}{since}; {tasks}{unjudged}"


def evaluation_summary(row: EvaluationStatus, *, named: bool = True) -> str:
    """Return an environment's row in a few words; without its name where there is one only."""
    first = "" if row.step == row.first_step else f", first {row.first:.2f}"
    best = "" if row.best is None or row.best_step in {row.step, row.first_step} else (
        f", best {row.best:.2f} after step {row.best_step}"
    )  # fmt: skip
    interval = None if row.low is None or row.high is None else (row.low, row.high)
    return f"{row.env + ' ' if named else ''}{with_interval(row.rate, interval)} (step {row.step}{first}{best})"


def with_interval(rate: float, interval: tuple[float, float] | None, digits: int = 2) -> str:
    """Return a rate and its 95 % interval, where that is known, as `0.38 [0.33, 0.44]`."""
    if interval is None:
        return f"{rate:.{digits}f}"
    low, high = interval
    return f"{rate:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def evaluation_warnings(evaluations: EvaluationHistory, folder: Path) -> dict[str, str]:
    """Return by environment a warning about a rate that dropped.

    It names the training reward over the same time if the run's folder is at hand.
    """
    return {
        fall.env: fall.describe(training_rewards(folder, fall.since_step, fall.step)) for fall in evaluations.falls()
    }
