"""Writes a run's `summary.json` from its figures, evaluations and ledger. No bus.

Guarantees that it covers the whole run, also if that was stopped and resumed, except for fields that are named as those
of the last start.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from lachesis.pipeline.common.means import finite_mean
from lachesis.pipeline.config.run import RunConfig
from lachesis.pipeline.notices.changes import PastNotice
from lachesis.pipeline.trainer.tracking import METRICS_FILE
from lachesis.services.observe.evaluations import EvaluationStatus
from lachesis.services.observe.rewards import EnvRewards, rewards_of
from lachesis.services.observe.services import Quantiles

__all__ = ["PLOTS", "SUMMARY_FILE", "RunSummary", "read_steps", "summarize_run"]

SUMMARY_FILE = "summary.json"
PLOTS = "plots"
_KEPT = ("train/step", "train/time", "train/sequences", "train/tokens", "reward/", "staleness/", "latency/", "eval/")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds; None: not known. `first_step`: where the last start began, `step`: the last one taken of
    `steps`. `reward_first` and `reward_last`: means over the first and the last tenth of the steps. `rewards`: of the
    newest step. `end_to_end` and `staleness_*` are in seconds and optimizer steps. `wall_s`, `to_first_step_s` (from
    the start to the end of its first step), `restarts` and `notices`, what stood in the way, are of the last start
    alone. `reason`: why it failed.
    """

    run: str
    state: Literal["finished", "stopped", "failed"]
    reason: str | None
    first_step: int
    step: int
    steps: int | None
    wall_s: float
    to_first_step_s: float | None
    sequences: int
    tokens: int
    outcomes: dict[str, int]
    reward_first: float | None
    reward_last: float | None
    rewards: dict[str, EnvRewards]
    staleness_mean: float | None
    staleness_max: float | None
    end_to_end: Quantiles
    evaluations: list[EvaluationStatus]
    restarts: dict[str, int]
    places: dict[str, str]
    notices: list[PastNotice] = []


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Return the figures of every step in a run's folder that a summary or a plot is made of, in order."""
    rows: list[dict[str, float]] = []
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # else it was cut off
                    figures = msgspec.json.decode(line, type=dict[str, float])
                    rows.append({name: value for name, value in figures.items() if name.startswith(_KEPT)})
    except FileNotFoundError:
        return []
    return rows


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
    notices: Sequence[PastNotice] = (),
) -> RunSummary:
    """Return the summary of a run that has ended; `reason`: why it failed, if it did.

    `started_s`: when its last start was, Unix seconds; None: not known.
    """
    newest = steps[-1] if steps else {}
    step = int(newest.get("train/step", 0))
    finished = config.training.steps is not None and step >= config.training.steps
    rewards = [row["reward/mean"] for row in steps if "reward/mean" in row]
    tenth = max(1, len(rewards) // 10)
    ended_s = next((row.get("train/time") for row in steps if row.get("train/step", 0.0) > first_step), None)
    staleness = [row["staleness/mean"] for row in steps if "staleness/mean" in row]
    return RunSummary(
        run=config.run,
        state="failed" if reason is not None else "finished" if finished else "stopped",
        reason=reason,
        first_step=first_step,
        step=step,
        steps=config.training.steps,
        wall_s=wall_s,
        to_first_step_s=None if started_s is None or ended_s is None else ended_s - started_s,
        sequences=int(sum(row.get("train/sequences", 0.0) for row in steps)),
        tokens=int(sum(row.get("train/tokens", 0.0) for row in steps)),
        outcomes=dict(outcomes),
        reward_first=finite_mean(rewards[:tenth]),
        reward_last=finite_mean(rewards[-tenth:]),
        rewards=rewards_of(newest),
        staleness_mean=finite_mean(staleness),
        staleness_max=max((row["staleness/max"] for row in steps if "staleness/max" in row), default=None),
        end_to_end=Quantiles(*(newest.get(f"latency/e2e/rolling_{label}") for label in ("p50", "p95", "p99"))),
        evaluations=list(evaluations),
        restarts={name: count for name, count in restarts.items() if count},
        places={name: str(path) for name, path in places.items() if path.exists()},
        notices=list(notices),
    )
