"""Computes what a run's `summary.json` holds, from its figures, evaluations and ledger. No bus.

Guarantees that it covers the whole run, also if that was stopped and resumed, except for fields that are named as those
of the last start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lachesis.pipeline.common.finite_mean import finite_mean
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.notices.changes import PastNotice
from lachesis.services.observe.evaluations import EvaluationStatus
from lachesis.services.observe.progress import all_figures
from lachesis.services.observe.run_state import EnvRates, RunState, RunTotals, fields_of_step

__all__ = ["PLOTS", "SUMMARY_FILE", "read_steps", "summarize_run", "totals_of"]

SUMMARY_FILE = "summary.json"
PLOTS = "plots"
_KEPT = ("train/step", "train/time", "train/sequences", "train/tokens", "reward/", "staleness/", "latency/", "eval/")


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Return the figures of every step in a run's folder that a summary or a plot is made of, in order."""
    return [
        {name: value for name, value in figures.items() if name.startswith(_KEPT)} for figures in all_figures(folder)
    ]


def summarize_run(
    config: RunConfig,
    steps: Sequence[Mapping[str, float]],
    *,
    first_step: int,
    wall_s: float,
    reason: str | None,
    outcomes: Mapping[str, int],
    evaluations: Sequence[EvaluationStatus],
    restarts: Mapping[str, int],
    places: Mapping[str, Path],
    started_s: float | None = None,
    first_taken_s: float | None = None,
    notices: Sequence[PastNotice] = (),
) -> RunState:
    """Return the state of a run that has ended, of which `SUMMARY_FIELDS` are written.

    `reason`: why it failed, if it did. `started_s`: when its last start was, and `first_taken_s`, when a step was heard
    of first, which a kill may have undone: the figures have when it was taken again. Unix seconds; None: not known.
    """
    known = fields_of_step(steps[-1] if steps else {})
    known["step"], known["evaluations"] = known["step"] or 0, list(evaluations)
    finished = config.training.steps is not None and known["step"] >= config.training.steps
    written_s = next((row.get("train/time") for row in steps if row.get("train/step", 0.0) > first_step), None)
    ended_s = min((at for at in (written_s, first_taken_s) if at is not None), default=None)
    return RunState(
        run=config.run,
        state="failed" if reason is not None else "finished" if finished else "stopped",
        problems=[] if reason is None else [reason],
        first_step=first_step,
        steps=config.training.steps,
        wall_s=wall_s,
        to_first_step_s=None if started_s is None or ended_s is None else ended_s - started_s,
        outcomes=dict(outcomes),
        totals=totals_of(steps),
        restarts={name: count for name, count in restarts.items() if count},
        places={name: str(path) for name, path in places.items() if path.exists()},
        past_notices=list(notices),
        **known,
    )


def totals_of(steps: Sequence[Mapping[str, float]]) -> RunTotals:
    """Return the totals over the figures of a run's steps. Pure."""
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    tenth = max(1, len(rewards) // 10)
    return RunTotals(
        sequences=int(sum(row.get("train/sequences", 0.0) for row in steps)),
        tokens=int(sum(row.get("train/tokens", 0.0) for row in steps)),
        reward_first=finite_mean(rewards[:tenth]),
        reward_last=finite_mean(rewards[-tenth:]),
        staleness_mean=finite_mean([row["staleness/mean"] for row in steps if "staleness/mean" in row]),
        staleness_max=max((row["staleness/max"] for row in steps if "staleness/max" in row), default=None),
        held_out=_held_out(steps),
    )


def _held_out(steps: Sequence[Mapping[str, float]]) -> dict[str, EnvRates]:
    """Return the held-out rates by environment."""
    rates: dict[str, list[float]] = {}
    for figures in steps:
        for name, value in figures.items():
            kind, _, rest = name.partition("/")
            env, _, measure = rest.rpartition("/")
            if kind == "eval" and measure.startswith("avg@"):
                rates.setdefault(env, []).append(value)
    return {env: EnvRates(first=values[0], last=values[-1], best=max(values)) for env, values in rates.items()}
