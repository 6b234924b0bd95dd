"""The whole of what `lachesis top` shows: stages, what limits them, and how the training goes.

Pure: no bus.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from lachesis.pipeline.config.secrets import without_secrets
from lachesis.schemas.control import Heartbeat
from lachesis.schemas.ledger import OutcomeKind
from lachesis.schemas.notices import Notice
from lachesis.services.observe.bottleneck import Bottleneck, find_bottleneck
from lachesis.services.observe.evaluations import EvaluationStatus
from lachesis.services.observe.notices import outcome_notices
from lachesis.services.observe.rewards import EnvRewards, rewards_of
from lachesis.services.observe.services import Quantiles, place
from lachesis.services.observe.window import Recent, StageRow

__all__ = [
    "Overview",
    "RewardCurve",
    "SlowRollout",
    "by_outcome",
    "finished",
    "look_back",
    "overview_at",
    "trace_url",
]

_REWARDS = 200
"""Steps whose rewards are kept."""


class SlowRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that was long under way, seconds from its task to the optimizer step; `url` where Jaeger shows it."""

    group: str
    seconds: float
    url: str | None = None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The run over the last `window_s` seconds, or as it stood when it `ended`; None: not known.

    step: optimizer steps taken; s_per_step: seconds from one to the next. staleness: optimizer steps between policy and
    training, of the newest batch (mean, largest), `staleness_bound` the most allowed. groups_per_s: groups batched.
    tokens_per_s: tokens trained on. e2e_p99_s: from task to step, of the newest batch. reward: mean score of the newest
    step; reward_trend: its growth per step since `top` looks; rewards: by step; env_rewards: of each environment, and
    of its raters lately. evaluations: the newest held-out one of each environment; warnings: what goes wrong, held-out
    rates that fell among it. outcomes: groups by what became of them, since the run began. outstanding and capacity:
    sequences under way, and the most that leases allow.
    """

    run: str
    window_s: float
    step: int | None
    s_per_step: float | None
    staleness: float | None
    staleness_max: float | None
    staleness_bound: float | None
    groups_per_s: float | None
    tokens_per_s: float | None
    e2e_p99_s: float | None
    reward: float | None
    reward_trend: float | None
    rewards: list[float]
    outstanding: float | None
    capacity: float | None
    outcomes: dict[str, int]
    bottleneck: Bottleneck | None
    stages: list[StageRow]
    slow: list[SlowRollout]
    evaluations: list[EvaluationStatus] = []
    env_rewards: dict[str, EnvRewards] = {}
    ended: bool = False
    notices: list[Notice] = []
    warnings: list[str] = []


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
) -> Overview:
    """Return the run as of `now_s`."""
    batcher, trainer = recent.figures("batcher"), recent.figures("trainer")
    learned = trainer[-1][1].metrics if trainer else {}
    batched = batcher[-1][1].metrics if batcher else {}
    governor = recent.figures("governor")
    flow = governor[-1][1].metrics if governor else {}
    step = learned.get("train/step")
    s_per_step = _per_step(trainer)
    tokens = [beat.metrics["train/tokens"] for _, beat in trainer if "train/tokens" in beat.metrics]
    outcomes = _outcomes(batched)
    rows = [_with_batches(row, trainer, batched) for row in recent.rows(now_s)]
    slow = {group: seconds for beat in recent.newest() for group, seconds in beat.slow.items()}
    return Overview(
        run=run,
        window_s=recent.window_s,
        step=None if step is None else int(step),
        s_per_step=s_per_step,
        staleness=batched.get("staleness/mean"),
        staleness_max=batched.get("staleness/max"),
        staleness_bound=batched.get("staleness/bound"),
        groups_per_s=_rate(batcher, "batching/outcomes/batched"),
        tokens_per_s=sum(tokens) / len(tokens) / s_per_step if tokens and s_per_step else None,
        e2e_p99_s=learned.get("latency/e2e/p99"),
        reward=learned.get("reward/mean"),
        reward_trend=rewards.trend(),
        rewards=rewards.values(),
        env_rewards=rewards_of({name: value for beat in recent.newest() for name, value in beat.metrics.items()}),
        outstanding=flow.get("flow/outstanding"),
        capacity=flow.get("flow/capacity"),
        outcomes=outcomes,
        bottleneck=find_bottleneck(rows, flow),
        stages=rows,
        slow=[
            SlowRollout(group=group, seconds=seconds, url=trace_url(jaeger_url, group))
            for group, seconds in sorted(slow.items(), key=lambda item: -item[1])[:5]
        ],
    )


def finished(overview: Overview) -> Overview:
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
) -> Overview:
    """Return how a run that has ended stood then. `steps`: the figures of its last steps, oldest first."""
    newest = steps[-1] if steps else {}
    rewards = RewardCurve()
    for figures in steps:
        rewards.record_step(figures)
    return Overview(
        run=run,
        ended=True,
        window_s=newest["train/time"] - steps[0]["train/time"] if "train/time" in newest else 0.0,
        step=int(newest["train/step"]) if "train/step" in newest else None,
        s_per_step=_seconds_a_step(steps),
        staleness=newest.get("staleness/mean"),
        staleness_max=newest.get("staleness/max"),
        staleness_bound=None,
        groups_per_s=newest.get("throughput/groups_per_s"),
        tokens_per_s=newest.get("throughput/tokens_per_s"),
        e2e_p99_s=newest.get("latency/e2e/p99"),
        reward=newest.get("reward/mean"),
        reward_trend=rewards.trend(),
        rewards=rewards.values(),
        env_rewards=rewards_of(newest),
        outstanding=None,
        capacity=None,
        outcomes=by_outcome(outcomes),
        bottleneck=None,
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
        slow=[],
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


def _per_step(beats: list[tuple[float, Heartbeat]]) -> float | None:
    return _seconds_a_step([beat.metrics for _, beat in beats])


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
