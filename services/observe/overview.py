"""The whole of what `lachesis top` shows: stages, what limits them, and how the training goes.

Pure: no bus.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from lachesis.pipeline.common.secrets import without_secrets
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.ledger import OutcomeKind
from lachesis.services.observe.bottleneck import find_bottleneck
from lachesis.services.observe.lost_generation import LostGeneration
from lachesis.services.observe.notices import outcome_notices
from lachesis.services.observe.rewards import rewards_of
from lachesis.services.observe.run_state import RunState, SlowRollout, fields_of_step
from lachesis.services.observe.services import Quantiles, place
from lachesis.services.observe.window import Recent, StageRow

__all__ = [
    "RewardCurve",
    "by_outcome",
    "finished",
    "look_back",
    "overview_at",
    "trace_url",
]

_REWARDS = 200
"""Steps whose rewards are kept."""


class RewardCurve:
    """The reward of each step that a heartbeat reported, oldest first."""

    def __init__(self) -> None:
        self._by_step: dict[float, float] = {}

    def record_step(self, metrics: Mapping[str, float]) -> None:
        if "train/step" in metrics and "reward/mean" in metrics:
            self._by_step[metrics["train/step"]] = metrics["reward/mean"]
            if len(self._by_step) > _REWARDS:
                del self._by_step[next(iter(self._by_step))]

    def values(self) -> list[float]:
        return list(self._by_step.values())

    def trend(self) -> float | None:
        """Return the growth per step of a least-squares line, None before three steps."""
        n = len(self._by_step)
        if n < 3:
            return None
        largest = max(map(abs, self._by_step.values())) or 1.0  # in units of it no sum overflows
        mean_x, mean_y = sum(self._by_step) / n, sum(y / largest for y in self._by_step.values()) / n
        spread = sum((x - mean_x) ** 2 for x in self._by_step)
        slope = sum((x - mean_x) * (y / largest - mean_y) for x, y in self._by_step.items()) / spread
        return slope * largest


def overview_at(
    run: str, recent: Recent, rewards: RewardCurve, now_s: float, *, jaeger_url: str | None = None
) -> RunState:
    """Return the run as of `now_s`."""
    batcher, trainer = recent.figures("batcher"), recent.figures("trainer")
    learned = trainer[-1][1].metrics if trainer else {}
    batched = batcher[-1][1].metrics if batcher else {}
    governor = recent.figures("governor")
    flow = governor[-1][1].metrics if governor else {}
    s_per_step = _seconds_a_step([beat.metrics for _, beat in trainer])
    tokens = [beat.metrics["train/tokens"] for _, beat in trainer if "train/tokens" in beat.metrics]
    # the batcher's staleness is newer than the trainer's, and every service may say rewards
    step = {name: value for name, value in learned.items() if not name.startswith("staleness/")}
    step |= {name: value for name, value in batched.items() if name.startswith("staleness/")}
    every = {name: value for beat in recent.newest() for name, value in beat.metrics.items()}
    rows = [_with_batches(row, trainer, batched) for row in recent.rows(now_s)]
    slow = {group: seconds for beat in recent.newest() for group, seconds in beat.slow.items()}
    return RunState(
        run=run,
        window_s=recent.window_s,
        s_per_step=s_per_step,
        staleness_bound=batched.get("staleness/bound"),
        groups_per_s=_rate(batcher, "batching/outcomes/batched"),
        tokens_per_s=sum(tokens) / len(tokens) / s_per_step if tokens and s_per_step else None,
        reward_trend=rewards.trend(),
        reward_curve=rewards.values(),
        outstanding=flow.get("flow/outstanding"),
        capacity=flow.get("flow/capacity"),
        outcomes=_outcomes(batched),
        lost_generation=LostGeneration.of(recent.newest()),
        bottleneck=find_bottleneck(rows, flow),
        stages=rows,
        slow=[
            SlowRollout(group=group, seconds=seconds, url=trace_url(jaeger_url, group))
            for group, seconds in sorted(slow.items(), key=lambda item: -item[1])[:5]
        ],
        **(fields_of_step(step) | {"rewards": rewards_of(every)}),
    )


def finished(overview: RunState) -> RunState:
    """Return a run whose last step is taken.

    Services of which nothing is heard any more have ended, and nothing limits it.
    """
    stages = [
        msgspec.structs.replace(row, state="finished") if row.state in {"silent", "stale"} else row
        for row in overview.stages
    ]
    return msgspec.structs.replace(overview, stages=stages, bottleneck=None, outstanding=None, capacity=None)


def look_back(
    run: str, services: Iterable[str], steps: Sequence[Mapping[str, float]], outcomes: Mapping[str, int]
) -> RunState:
    """Return how a run that has ended stood then. `steps`: the figures of its last steps, oldest first."""
    newest = steps[-1] if steps else {}
    rewards = RewardCurve()
    for figures in steps:
        rewards.record_step(figures)
    return RunState(
        run=run,
        ended=True,
        window_s=newest["train/time"] - steps[0]["train/time"] if "train/time" in newest else 0.0,
        s_per_step=_seconds_a_step(steps),
        groups_per_s=newest.get("throughput/groups_per_s"),
        tokens_per_s=newest.get("throughput/tokens_per_s"),
        reward_trend=rewards.trend(),
        reward_curve=rewards.values(),
        outcomes=by_outcome(outcomes),
        notices=outcome_notices(outcomes),
        stages=[
            StageRow(
                service=service,
                state="ended",
                wait=_rolling(newest, f"latency/{service}/wait"),
                process=_rolling(newest, f"latency/{service}/proc"),
            )
            for service in sorted(services, key=place)
        ],
        **fields_of_step(newest),
    )


def _rolling(figures: Mapping[str, float], name: str) -> Quantiles:
    return Quantiles(*(figures.get(f"{name}/rolling_{label}") for label in ("p50", "p95", "p99")))


def trace_url(base: str | None, group: str) -> str | None:
    """Return the page of a group's trace in Jaeger at `base`."""
    return f"{without_secrets(base).rstrip('/')}/trace/{group}" if base else None


def by_outcome(totals: Mapping[str, int]) -> dict[str, int]:
    """Return the groups by what became of them, of a ledger's totals, which count sequences as well."""
    return {kind: totals[kind] for kind in sorted(get_args(OutcomeKind)) if kind in totals}


def _outcomes(metrics: dict[str, float]) -> dict[str, int]:
    return {
        name.rpartition("/")[2]: int(value)
        for name, value in sorted(metrics.items())
        if name.startswith("batching/outcomes/")
    }


def _rate(beats: list[tuple[float, Heartbeat]], figure: str) -> float | None:
    """Return the growth per second of one of a service's own figures."""
    known = [beat for _, beat in beats if figure in beat.metrics]
    span_s = (known[-1].time_ns - known[0].time_ns) / 1e9 if known else 0.0
    return (known[-1].metrics[figure] - known[0].metrics[figure]) / span_s if span_s > 0 else None


def _seconds_a_step(steps: Sequence[Mapping[str, float]]) -> float | None:
    """Return seconds a step: between the ends of the first and the last step seen, None if no second one ended."""
    ends = {
        figures["train/step"]: figures["train/time"]
        for figures in steps
        if {"train/step", "train/time"} <= figures.keys()
    }
    taken = max(ends) - min(ends) if ends else 0.0
    return (ends[max(ends)] - ends[min(ends)]) / taken if taken > 0 else None


def _with_batches(row: StageRow, trainer: list[tuple[float, Heartbeat]], batched: dict[str, float]) -> StageRow:
    """Return a row, the trainer's with the batches that wait for it or are in it, which the batcher knows."""
    if row.service != "trainer" or "batching/batches" not in batched:
        return row
    trained = trainer[-1][1].metrics.get("train/step", 0.0) if trainer else 0.0
    lag = max(0, int(batched["batching/batches"] - trained))
    at_hand = [beat.stage.in_flight for _, beat in trainer]
    size = max(at_hand, default=0)
    waiting = max(0, lag - 1) * size
    return msgspec.structs.replace(row, lag=lag, held=None if row.held is None else row.held + waiting)
